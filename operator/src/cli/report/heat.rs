//! How much each expert computed, by layer and step: a field of colours for each layer.

use super::read::Run;
use std::fmt::Write;

/// Fields of all layers of all runs of a page: what keeps it small.
const FIELDS_MAX: usize = 36_000;
const COLUMNS: std::ops::RangeInclusive<usize> = 6..=120;
/// Colours: of loads below, at and above the mean.
const LEVELS: usize = 11;

/// The heat maps of a run, one a layer; nothing where no load was recorded. `runs` share a page.
pub fn draw(run: &Run, runs: usize) -> String {
    let Some((_, first)) = run.loads.first() else { return String::new() };
    let rows: usize = first.iter().map(Vec::len).sum();
    if rows == 0 {
        return String::new();
    }
    let most = FIELDS_MAX / rows / runs.max(1);
    let columns = most.clamp(*COLUMNS.start(), *COLUMNS.end()).min(run.loads.len());
    let mut html = String::new();
    for layer in 0..first.len() {
        html.push_str(&field(run, layer, columns));
    }
    html
}

/// [column][expert]: load over the mean of the layer.
fn shares(run: &Run, layer: usize, columns: usize) -> Vec<Vec<f64>> {
    let piece = run.loads.len().div_ceil(columns.max(1));
    let column = |steps: &[(u64, Vec<Vec<f64>>)]| {
        let mut sums: Vec<f64> = Vec::new();
        for loads in steps.iter().filter_map(|(_, loads)| loads.get(layer)) {
            sums.resize(sums.len().max(loads.len()), 0.0);
            sums.iter_mut().zip(loads).for_each(|(sum, load)| *sum += load);
        }
        let mean = sums.iter().sum::<f64>() / sums.len().max(1) as f64;
        sums.into_iter().map(|sum| if mean > 0.0 { sum / mean } else { 0.0 }).collect()
    };
    run.loads.chunks(piece.max(1)).map(column).collect()
}

/// 0 is no load, the middle the mean, the last one three times as much and more.
fn level(share: f64) -> usize {
    let middle = (LEVELS - 1) as f64 / 2.0;
    let place = if share <= 1.0 { share * middle } else { middle + (share - 1.0) * middle / 2.0 };
    (place.round() as usize).min(LEVELS - 1)
}

fn field(run: &Run, layer: usize, columns: usize) -> String {
    let shares = shares(run, layer, columns);
    let experts = shares.iter().map(Vec::len).max().unwrap_or(0);
    let width = shares.len();
    let mut paths = vec![String::new(); LEVELS];
    for expert in 0..experts {
        let levels: Vec<usize> =
            shares.iter().map(|column| level(column.get(expert).copied().unwrap_or(0.0))).collect();
        let mut from = 0;
        for same in levels.chunk_by(|a, b| a == b) {
            let long = same.len();
            let _ = write!(paths[same[0]], "M{from} {expert}h{long}v1h-{long}z");
            from += long;
        }
    }
    let first = run.loads.first().map_or(0, |(step, _)| *step);
    let last = run.loads.last().map_or(0, |(step, _)| *step);
    // Rows are high enough to see, whatever their number.
    let high = (experts * 14).clamp(60, 240);
    let mut html = format!(
        "<figure class=\"heat\"><figcaption>layer {layer}: {experts} experts, steps {first} to \
         {last}</figcaption><svg viewBox=\"0 0 {width} {experts}\" preserveAspectRatio=\"none\" \
         style=\"height:{high}px\" role=\"img\">"
    );
    for (level, path) in paths.iter().enumerate().filter(|(_, path)| !path.is_empty()) {
        let _ = write!(html, "<path class=\"h{level}\" d=\"{path}\"/>");
    }
    html.push_str("</svg></figure>\n");
    html
}

/// The colours of both schemes: blue below the mean, red above, and the mean near the paper.
pub fn style() -> String {
    let rules = |middle: f64| -> String {
        let rule = |(level, colour)| format!(".h{level}{{fill:{colour};background:{colour}}}\n");
        colours(middle).into_iter().enumerate().map(rule).collect()
    };
    format!("{}@media (prefers-color-scheme:dark){{\n{}}}\n", rules(245.0), rules(44.0))
}

fn colours(middle: f64) -> Vec<String> {
    let colour = |level: usize| {
        let place = level as f64 / (LEVELS - 1) as f64 * 2.0 - 1.0;
        let mix = |full: f64| (middle + (full - middle) * place.abs()) as u8;
        let dark = middle < 128.0;
        let [r, g, b] = match (place < 0.0, dark) {
            (true, false) => [33.0, 102.0, 172.0],
            (true, true) => [88.0, 166.0, 255.0],
            (false, false) => [178.0, 24.0, 43.0],
            (false, true) => [255.0, 123.0, 114.0],
        };
        format!("#{:02x}{:02x}{:02x}", mix(r), mix(g), mix(b))
    };
    (0..LEVELS).map(colour).collect()
}

/// A row of all of them.
pub fn legend() -> String {
    (0..LEVELS).map(|level| format!("<i class=\"h h{level}\"></i>")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn colours_follow_the_load() {
        assert_eq!([0.0, 1.0, 3.0, 90.0].map(level), [0, 5, 10, 10]);
        assert_eq!(colours(245.0)[5], "#f5f5f5");
        assert!(style().contains(".h10{fill:#b2182b;background:#b2182b}"));
        let loads = |a: f64, b: f64| vec![vec![a, b]];
        let run = Run {
            loads: (0..100).map(|step| (step, loads(10.0, 30.0))).collect(),
            ..Run::default()
        };
        assert_eq!(shares(&run, 0, 10), vec![vec![0.5, 1.5]; 10]);
        let html = draw(&run, 1);
        // One run of equal fields each.
        assert!(html.contains("M0 0h100v1h-100z") && html.contains("M0 1h100v1h-100z"), "{html}");
        assert_eq!(draw(&Run::default(), 1), "");
    }
}
