//! Counted things as a person says them, and columns as one reads them.

use std::ops::Range;

/// `1 node`, `3 nodes`.
pub fn several(count: impl TryInto<u64>, what: &str) -> String {
    counted(count, what, &format!("{what}s"))
}

/// `1 leaf`, `3 leaves`: of words that get more than an s.
pub fn counted(count: impl TryInto<u64>, one: &str, many: &str) -> String {
    match count.try_into().unwrap_or(u64::MAX) {
        1 => format!("1 {one}"),
        count => format!("{count} {many}"),
    }
}

/// Behind `several`: `1 node is`, `3 nodes are`.
pub fn one_or_more<'w>(count: impl TryInto<u64>, one: &'w str, more: &'w str) -> &'w str {
    if count.try_into().is_ok_and(|count| count == 1) { one } else { more }
}

/// `30.5 B`, `3.35 B`, `1.20 M`, `950`: in the units in which sizes of models are published.
pub fn count(number: u64) -> String {
    let (value, unit) = match number {
        0..1_000 => return number.to_string(),
        1_000..1_000_000 => (number as f64 / 1e3, "k"),
        1_000_000..1_000_000_000 => (number as f64 / 1e6, "M"),
        _ => (number as f64 / 1e9, "B"),
    };
    let decimals = if value < 9.995 { 2 } else { 1 };
    format!("{value:.decimals$} {unit}")
}

/// Columns with two spaces between them. Those of `numbers` end below each other, the others begin
/// so. Each line ends with a newline, and none with a space.
pub fn aligned(rows: &[Vec<String>], numbers: Range<usize>) -> String {
    let width = |column: usize| {
        rows.iter().filter_map(|row| Some(row.get(column)?.chars().count())).max().unwrap_or(0)
    };
    let mut text = String::new();
    for row in rows {
        let cells = row.iter().enumerate().map(|(at, cell)| {
            let w = width(at);
            if numbers.contains(&at) { format!("{cell:>w$}") } else { format!("{cell:<w$}") }
        });
        text += cells.collect::<Vec<_>>().join("  ").trim_end();
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_is_no_plural() {
        assert_eq!([several(0u32, "node"), several(1u64, "node")], ["0 nodes", "1 node"]);
        assert_eq!([several(2usize, "rank"), counted(1, "leaf", "leaves")], ["2 ranks", "1 leaf"]);
        assert_eq!(counted(3, "leaf", "leaves"), "3 leaves");
        assert_eq!([one_or_more(1u32, "is", "are"), one_or_more(0u32, "is", "are")], ["is", "are"]);
    }
}
