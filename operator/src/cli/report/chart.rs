//! Lines over steps or time, as SVG.

use super::{escaped, short};
use std::fmt::Write;

/// In units of the drawing, which is about as wide as a telephone: it is scaled little.
const WIDTH: f64 = 400.0;
const HEIGHT: f64 = 220.0;
const LEFT: f64 = 50.0;
const RIGHT: f64 = 8.0;
const TOP: f64 = 8.0;
const BOTTOM: f64 = 32.0;
/// Points of a line at most: the least and the largest of each of so many pieces, twice.
const PIECES: usize = 300;
/// Marks of one chart at most.
const MARKS_MAX: usize = 100;

/// One run's line; `run` is its colour.
pub struct Line {
    pub run: usize,
    pub points: Vec<(f64, f64)>,
}

/// What happened at a place of the axis.
pub struct Mark {
    pub x: f64,
    /// A loss, or the beginning of an attempt.
    pub lost: bool,
    pub title: String,
}

pub struct Chart {
    pub title: &'static str,
    /// What it is, in a line.
    pub about: &'static str,
    /// Of the axis below.
    pub axis: &'static str,
    pub lines: Vec<Line>,
    pub marks: Vec<Mark>,
    /// The axis at the side begins at zero.
    pub from_zero: bool,
    /// The line keeps a value until the next.
    pub stairs: bool,
}

impl Chart {
    /// Nothing where there is nothing to draw.
    pub fn draw(&self) -> String {
        let all = || self.lines.iter().flat_map(|line| &line.points);
        if all().next().is_none() {
            return String::new();
        }
        let range = |of: fn(&(f64, f64)) -> f64| {
            all().map(of).fold((f64::MAX, f64::MIN), |(low, high), x| (low.min(x), high.max(x)))
        };
        let (x0, x1) = wider(range(|point| point.0));
        let (y0, y1) = wider(range(|point| point.1));
        let y0 = if self.from_zero { y0.min(0.0) } else { y0 };
        let frame = Frame { x0, x1, y0, y1 };
        let mut svg = format!(
            "<figure><figcaption><b>{}</b> {}</figcaption>\
             <svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\">",
            self.title, self.about
        );
        frame.axes(&mut svg, self.axis);
        for mark in self.marks.iter().filter(|mark| (x0..=x1).contains(&mark.x)).take(MARKS_MAX) {
            frame.mark(&mut svg, mark);
        }
        for line in &self.lines {
            self.line(&mut svg, &frame, line);
        }
        svg.push_str("</svg>");
        for line in &self.lines {
            let Some((_, last)) = line.points.last() else { continue };
            let low = line.points.iter().map(|point| point.1).fold(f64::MAX, f64::min);
            let high = line.points.iter().map(|point| point.1).fold(f64::MIN, f64::max);
            let [last, low, high] = [*last, low, high].map(short);
            let run = line.run;
            let _ = write!(
                svg,
                "<span class=\"c{run}\">last {last}, least {low}, most {high}</span>"
            );
        }
        svg.push_str("</figure>\n");
        svg
    }

    fn line(&self, svg: &mut String, frame: &Frame, line: &Line) {
        let _ = write!(svg, "<polyline class=\"c{}\" points=\"", line.run);
        let mut before: Option<f64> = None;
        for (x, y) in thinned(&line.points) {
            let (x, y) = (frame.x(x), frame.y(y));
            if let Some(before) = before.filter(|_| self.stairs) {
                let _ = write!(svg, "{x:.1},{before:.1} ");
            }
            let _ = write!(svg, "{x:.1},{y:.1} ");
            before = Some(y);
        }
        svg.push_str("\"/>");
    }
}

/// A range that is not empty.
fn wider((low, high): (f64, f64)) -> (f64, f64) {
    if high > low {
        return (low, high);
    }
    let by = (low.abs() * 0.1).max(1e-9);
    (low - by, high + by)
}

/// At most `2 * PIECES` points: the least and the largest of each piece, in their order. No peak is
/// lost.
fn thinned(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    if points.len() <= 2 * PIECES {
        return points.to_vec();
    }
    let mut kept = Vec::with_capacity(2 * PIECES);
    for piece in points.chunks(points.len().div_ceil(PIECES)) {
        let by = |a: &(usize, &(f64, f64)), b: &(usize, &(f64, f64))| a.1.1.total_cmp(&b.1.1);
        let least = piece.iter().enumerate().min_by(by).map(|(at, _)| at);
        let most = piece.iter().enumerate().max_by(by).map(|(at, _)| at);
        let mut both: Vec<usize> = least.into_iter().chain(most).collect();
        both.sort_unstable();
        both.dedup();
        kept.extend(both.into_iter().map(|at| piece[at]));
    }
    kept
}

struct Frame {
    x0: f64,
    x1: f64,
    y0: f64,
    y1: f64,
}

impl Frame {
    fn x(&self, x: f64) -> f64 {
        LEFT + (x - self.x0) / (self.x1 - self.x0) * (WIDTH - LEFT - RIGHT)
    }

    fn y(&self, y: f64) -> f64 {
        HEIGHT - BOTTOM - (y - self.y0) / (self.y1 - self.y0) * (HEIGHT - TOP - BOTTOM)
    }

    fn axes(&self, svg: &mut String, axis: &str) {
        let (right, bottom) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
        for (y, text) in labelled(ticks(self.y0, self.y1, 4)) {
            let at = self.y(y);
            let _ = write!(
                svg,
                "<path class=\"grid\" d=\"M{LEFT} {at:.1}H{right}\"/>\
                 <text class=\"side\" x=\"{}\" y=\"{:.1}\">{text}</text>",
                LEFT - 4.0,
                at + 4.0
            );
        }
        for (x, text) in labelled(ticks(self.x0, self.x1, 5)) {
            let at = self.x(x);
            // What stands in the middle of the last place would be cut off.
            let class = if at > right - 12.0 { "side" } else { "below" };
            let _ = write!(
                svg,
                "<path class=\"grid\" d=\"M{at:.1} {TOP}V{bottom}\"/>\
                 <text class=\"{class}\" x=\"{at:.1}\" y=\"{}\">{text}</text>",
                bottom + 13.0
            );
        }
        let end = HEIGHT - 5.0;
        let _ = write!(svg, "<text class=\"side\" x=\"{right}\" y=\"{end}\">{axis}</text>");
    }

    fn mark(&self, svg: &mut String, mark: &Mark) {
        let (x, bottom) = (self.x(mark.x), HEIGHT - BOTTOM);
        let class = if mark.lost { "lost" } else { "begun" };
        let title = escaped(&mark.title);
        let _ = write!(
            svg,
            "<g class=\"{class}\"><title>{title}</title><path d=\"M{x:.1} {TOP}V{bottom}\"/>"
        );
        if mark.lost {
            let (left, right, point) = (x - 4.0, x + 4.0, TOP + 7.0);
            let _ = write!(
                svg,
                "<path class=\"full\" d=\"M{left:.1} {TOP}H{right:.1}L{x:.1} {point}Z\"/>"
            );
        }
        svg.push_str("</g>");
    }
}

/// About `count` round numbers between two: 1, 2 or 5 times a power of ten apart.
fn ticks(low: f64, high: f64, count: usize) -> Vec<f64> {
    let rough = (high - low) / count as f64;
    let power = 10_f64.powf(rough.log10().floor());
    let times = [1.0, 2.0, 5.0, 10.0].into_iter().find(|times| times * power >= rough);
    let step = times.unwrap_or(10.0) * power;
    let first = (low / step).ceil() as i64;
    let last = (high / step).floor() as i64;
    (first..=last.min(first + 20)).map(|at| at as f64 * step).collect()
}

/// Numbers and how they are written: in more digits where few would make two of them one.
fn labelled(ticks: Vec<f64>) -> Vec<(f64, String)> {
    let texts: Vec<String> = ticks.iter().copied().map(short).collect();
    let alike = texts.windows(2).any(|pair| pair[0] == pair[1]);
    let long = |tick: &f64| {
        let text = format!("{tick:.6}");
        text.trim_end_matches('0').trim_end_matches('.').to_string()
    };
    let texts = if alike { ticks.iter().map(long).collect() } else { texts };
    ticks.into_iter().zip(texts).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_told_apart() {
        let texts = |ticks: &[f64]| -> Vec<String> {
            labelled(ticks.to_vec()).into_iter().map(|of| of.1).collect()
        };
        assert_eq!(texts(&[100_000.0, 100_020.0]), ["100000", "100020"]);
        assert_eq!(texts(&[0.0, 5000.0, 10_000.0]), ["0", "5000", "10K"]);
    }

    #[test]
    fn ticks_are_round_numbers_within_the_range() {
        assert_eq!(ticks(0.0, 10_000.0, 4), [0.0, 5000.0, 10_000.0]);
        assert_eq!(ticks(1.3, 5.6, 4), [2.0, 4.0]);
        let small = ticks(0.0, 3e-3, 4);
        let small: Vec<String> = small.into_iter().map(short).collect();
        assert_eq!(small, ["0", "0.001", "0.002", "0.003"]);
    }

    #[test]
    fn thinning_keeps_every_peak() {
        let mut points: Vec<(f64, f64)> = (0..10_000).map(|x| (f64::from(x), 1.0)).collect();
        points[4321].1 = 9.0;
        points[8765].1 = -9.0;
        let kept = thinned(&points);
        assert!(kept.len() <= 2 * PIECES, "{}", kept.len());
        assert!(kept.contains(&(4321.0, 9.0)) && kept.contains(&(8765.0, -9.0)));
        assert!(kept.windows(2).all(|pair| pair[0].0 < pair[1].0));
    }

    #[test]
    fn one_value_can_be_drawn() {
        let lines = vec![Line { run: 0, points: vec![(1.0, 0.0)] }];
        let (title, about, axis) = ("T", "", "step");
        let chart = Chart {
            title, about, axis, lines, marks: Vec::new(), from_zero: false, stairs: false,
        };
        let svg = chart.draw();
        assert!(svg.contains("polyline") && !svg.contains("NaN") && !svg.contains("inf"), "{svg}");
    }
}
