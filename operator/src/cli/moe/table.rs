//! Columns as kubectl aligns them, and times as it writes them.

use moejob_manifest::problem::printable;
use moejob_plan::observed::Millis;

/// Spaces between two columns.
const GAP: usize = 3;

/// A table: heads, and as many cells in each row.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Table {
    heads: Vec<&'static str>,
    rows: Vec<Vec<String>>,
}

impl Table {
    pub fn new(heads: &[&'static str]) -> Table {
        Table { heads: heads.to_vec(), rows: Vec::new() }
    }

    pub fn row(&mut self, cells: Vec<String>) {
        debug_assert_eq!(cells.len(), self.heads.len());
        // Names, reasons and words of others stand in them.
        self.rows.push(cells.iter().map(|cell| printable(cell)).collect());
    }

    /// Each line ends with a newline; no line ends with a space.
    pub fn text(&self) -> String {
        self.render(true, &self.widths())
    }

    /// The width of each column, gaps aside; a later row of the same table may be wider.
    pub fn widths(&self) -> Vec<usize> {
        let width = |column: usize| {
            let cells = self.rows.iter().map(|row| row[column].chars().count());
            cells.chain([self.heads[column].len()]).max().unwrap_or(0)
        };
        (0..self.heads.len()).map(width).collect()
    }

    /// The rows alone, or with their heads, in columns of at least these widths.
    pub fn render(&self, heads: bool, widths: &[usize]) -> String {
        let own = self.widths();
        let heads = heads.then(|| self.heads.iter().map(|head| head.to_string()).collect());
        let mut text = String::new();
        for row in heads.iter().chain(&self.rows) {
            let row: &Vec<String> = row;
            let mut line = String::new();
            for (column, cell) in row.iter().enumerate() {
                let width = own[column].max(widths.get(column).copied().unwrap_or(0)) + GAP;
                line += &format!("{cell:<width$}");
            }
            text += line.trim_end();
            text.push('\n');
        }
        text
    }
}

/// `7s`, `2m10s`, `15m`, `3h20m`, `2d`: the coarser the longer, as kubectl writes ages.
pub fn age(span: Millis) -> String {
    let seconds = span / 1000;
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86_400);
    let two = |major: u64, name: char, minor: u64, of: char| match minor {
        0 => format!("{major}{name}"),
        _ => format!("{major}{name}{minor}{of}"),
    };
    match seconds {
        0..120 => format!("{seconds}s"),
        _ if minutes < 10 => two(minutes, 'm', seconds % 60, 's'),
        _ if minutes < 180 => format!("{minutes}m"),
        _ if hours < 8 => two(hours, 'h', minutes % 60, 'm'),
        _ if hours < 48 => format!("{hours}h"),
        _ if days < 8 => two(days, 'd', hours % 24, 'h'),
        _ if days < 730 => format!("{days}d"),
        _ => two(days / 365, 'y', days % 365, 'd'),
    }
}

/// `12 ms`, `1.4 s`, `2m10s`: what somebody waited for.
pub fn span(span: Millis) -> String {
    match span {
        0..1000 => format!("{span} ms"),
        1000..60_000 => format!("{:.1} s", span as f64 / 1e3),
        _ => age(span),
    }
}

/// Milliseconds since 1970 of a time as Kubernetes writes it.
pub fn millis(text: &str) -> Option<Millis> {
    let time: k8s_openapi::jiff::Timestamp = text.parse().ok()?;
    u64::try_from(time.as_millisecond()).ok()
}

/// `2026-11-21T17:05:02Z`.
pub fn stamp(at: Millis) -> String {
    let millis = i64::try_from(at).unwrap_or(i64::MAX);
    let time = k8s_openapi::jiff::Timestamp::from_millisecond(millis).unwrap_or_default();
    format!("{time:.0}")
}

/// `12.3k`: three or four digits of a number.
pub fn short(value: f64) -> String {
    match value.abs() {
        size if !size.is_finite() => value.to_string(),
        size if size >= 1e6 => format!("{:.2}M", value / 1e6),
        size if size >= 1e4 => format!("{:.1}k", value / 1e3),
        _ => format!("{value:.0}"),
    }
}

/// `512Mi`, as kubectl top writes memory.
pub fn mebibytes(bytes: u64) -> String {
    format!("{}Mi", bytes.div_ceil(1 << 20))
}

/// At most `most` characters of the first line.
pub fn cut(text: &str, most: usize) -> String {
    let line = text.lines().next().unwrap_or_default();
    if line.chars().count() <= most && line.len() == text.trim_end().len() {
        return line.to_string();
    }
    let kept: String = line.chars().take(most.saturating_sub(3)).collect();
    format!("{}...", kept.trim_end())
}

/// A cell, or `-`.
pub fn or_dash<T>(value: Option<T>, show: impl Fn(T) -> String) -> String {
    value.map_or_else(|| "-".to_string(), show)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_stand_below_each_other() {
        let mut table = Table::new(&["NAME", "PHASE", "WHY"]);
        table.row(vec!["a".into(), "Running".into(), String::new()]);
        table.row(vec!["a-longer-one".into(), "Pending".into(), "2 of 4 nodes".into()]);
        let expected = "\
NAME           PHASE     WHY
a              Running
a-longer-one   Pending   2 of 4 nodes
";
        assert_eq!(table.text(), expected);
        let widths = table.widths();
        let mut more = Table::new(&["NAME", "PHASE", "WHY"]);
        more.row(vec!["b".into(), "Complete".into(), "done".into()]);
        assert_eq!(more.render(false, &widths), "b              Complete   done\n");
    }

    #[test]
    fn ages_are_those_of_kubectl() {
        let second = 1000;
        let (minute, hour, day) = (60 * second, 3600 * second, 86_400 * second);
        for (time, expected) in [
            (0, "0s"),
            (119 * second, "119s"),
            (2 * minute, "2m"),
            (9 * minute + 59 * second, "9m59s"),
            (10 * minute + 5 * second, "10m"),
            (179 * minute, "179m"),
            (3 * hour, "3h"),
            (7 * hour + 59 * minute, "7h59m"),
            (47 * hour, "47h"),
            (2 * day, "2d"),
            (7 * day + 5 * hour, "7d5h"),
            (700 * day, "700d"),
            (800 * day, "2y70d"),
        ] {
            assert_eq!(age(time), expected);
        }
        assert_eq!([span(12), span(1_440), span(130_000)], ["12 ms", "1.4 s", "2m10s"]);
    }

    #[test]
    fn times_and_numbers() {
        assert_eq!(millis("2026-11-21T17:05:02Z"), Some(1_795_280_702_000));
        assert_eq!(millis("2026-11-21T17:05:02.250000Z"), Some(1_795_280_702_250));
        assert_eq!(millis("soon"), None);
        assert_eq!(stamp(1_795_280_702_250), "2026-11-21T17:05:02Z");
        let shown = [short(950.4), short(9_999.0), short(12_340.0), short(2.5e6)];
        assert_eq!(shown, ["950", "9999", "12.3k", "2.50M"]);
        assert_eq!(mebibytes(1 << 29), "512Mi");
    }

    #[test]
    fn long_texts_are_cut() {
        assert_eq!(cut("short", 10), "short");
        assert_eq!(cut("short\n", 10), "short");
        assert_eq!(cut("a\nb", 10), "a...");
        assert_eq!(cut("abcdefghijkl", 10), "abcdefg...");
    }
}
