//! Lines over steps, tokens and time, as SVG.

use super::short;
use moejob_offline::page::escaped;
use std::fmt::Write;

/// In units of the drawing, which is about as wide as a telephone: it is scaled little.
const WIDTH: f64 = 400.0;
const HEIGHT: f64 = 220.0;
const LEFT: f64 = 50.0;
const RIGHT: f64 = 8.0;
const TOP: f64 = 8.0;
const BOTTOM: f64 = 32.0;
/// Points of a line at most: the least and the largest of each of so many pieces. Of many lines in
/// a chart each has fewer.
const PIECES: usize = 300;
const PIECES_MIN: usize = 60;
/// Marks of one chart at most.
const MARKS_MAX: usize = 100;

/// The axis below counts one of these. Each is drawn, and the page shows the one that is chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Axis {
    Step,
    Tokens,
    /// Seconds that one has, and the unit in which they are read.
    Time(f64, &'static str),
}

/// A point lies at a step, by the tokens and the seconds until then, and has a value.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Point {
    pub step: f64,
    pub tokens: f64,
    pub seconds: f64,
    pub y: f64,
}

impl Point {
    fn on(&self, axis: Axis) -> f64 {
        match axis {
            Axis::Step => self.step,
            Axis::Tokens => self.tokens,
            Axis::Time(seconds, _) => self.seconds / seconds,
        }
    }
}

/// The look of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    Plain,
    /// Faint where the smooth line is shown.
    Raw,
    Smooth,
    /// Dashed, with a dot at each point.
    HeldOut,
}

/// One run's line; `run` is its colour.
pub struct Line {
    pub run: usize,
    pub name: String,
    pub style: Style,
    pub points: Vec<Point>,
}

/// What happened at a place of the axis.
pub struct Mark {
    pub at: Point,
    /// A loss, or the beginning of an attempt.
    pub lost: bool,
    pub title: String,
}

pub struct Chart {
    pub title: &'static str,
    /// What it is, in a line.
    pub about: &'static str,
    /// The first is shown at first.
    pub axes: Vec<Axis>,
    pub lines: Vec<Line>,
    pub marks: Vec<Mark>,
    /// The axis at the side begins at zero.
    pub from_zero: bool,
    /// The line keeps a value until the next.
    pub stairs: bool,
    /// It can be drawn on a logarithmic axis, too, and is drawn twice as large.
    pub main: bool,
}

impl Chart {
    /// Nothing where there is nothing to draw.
    pub fn draw(&self) -> String {
        let all = || self.lines.iter().flat_map(|line| &line.points);
        if all().next().is_none() {
            return String::new();
        }
        let mut html = format!(
            "<figure{}><figcaption><b>{}</b> {}</figcaption>",
            if self.main { " class=\"large\"" } else { "" },
            self.title,
            self.about
        );
        let is_positive = all().all(|point| point.y > 0.0);
        for (at, axis) in self.axes.iter().enumerate() {
            let of_axis = if self.axes.len() > 1 { format!(" x{at}") } else { String::new() };
            if self.main && is_positive {
                self.svg(&mut html, *axis, &format!("{of_axis} linear"), false);
                self.svg(&mut html, *axis, &format!("{of_axis} log"), true);
            } else {
                self.svg(&mut html, *axis, &of_axis, false);
            }
        }
        html.push_str("<output></output>");
        for line in self.lines.iter().filter(|line| line.style != Style::Smooth) {
            let Some(last) = line.points.last() else { continue };
            let low = line.points.iter().map(|point| point.y).fold(f64::MAX, f64::min);
            let high = line.points.iter().map(|point| point.y).fold(f64::MIN, f64::max);
            let [last, low, high] = [last.y, low, high].map(short);
            let (run, name) = (line.run, escaped(&line.name));
            let dash = if line.style == Style::HeldOut { "- - " } else { "\u{2014} " };
            let _ = write!(
                html,
                "<span class=\"c{run}\">{dash}{name}: last {last}, least {low}, most {high}</span>"
            );
        }
        html.push_str("</figure>\n");
        html
    }

    fn svg(&self, svg: &mut String, axis: Axis, class: &str, log: bool) {
        let scaled = |y: f64| if log { y.log10() } else { y };
        let all = || self.lines.iter().flat_map(|line| &line.points);
        let range = |of: &dyn Fn(&Point) -> f64| {
            all().map(of).fold((f64::MAX, f64::MIN), |(low, high), x| (low.min(x), high.max(x)))
        };
        let (x0, x1) = wider(range(&|point| point.on(axis)));
        let (y0, y1) = wider(range(&|point| scaled(point.y)));
        let y0 = if self.from_zero { y0.min(0.0) } else { y0 };
        let frame = Frame { x0, x1, y0, y1 };
        let (name, decimals) = match axis {
            Axis::Step => ("step", 0),
            Axis::Tokens => ("tokens", 0),
            Axis::Time(_, unit) => (unit, 2),
        };
        let _ = write!(
            svg,
            "<svg class=\"chart{class}\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" \
             data-x=\"{x0} {x1} {LEFT} {}\" data-y=\"{y0} {y1} {} {TOP}\" data-axis=\"{name}\"\
             {}{}>",
            WIDTH - RIGHT,
            HEIGHT - BOTTOM,
            if log { " data-log" } else { "" },
            if self.stairs { " data-stairs" } else { "" },
        );
        frame.axes(svg, name, log);
        let within = |mark: &&Mark| (x0..=x1).contains(&mark.at.on(axis));
        for mark in self.marks.iter().filter(within).take(MARKS_MAX) {
            frame.mark(svg, mark, axis);
        }
        // The points are in their own units, so that who reads the page finds the values in it.
        let transform = frame.transform();
        let pieces = (PIECES * 3 / self.lines.len().max(3)).max(PIECES_MIN);
        for line in &self.lines {
            let class = match line.style {
                Style::Plain => "",
                Style::Raw => " raw",
                Style::Smooth => " smooth",
                Style::HeldOut => " held",
            };
            let points: Vec<(f64, f64)> =
                line.points.iter().map(|point| (point.on(axis), scaled(point.y))).collect();
            let points = thinned(&points, pieces);
            let name = escaped(&line.name);
            let _ = write!(
                svg,
                "<polyline class=\"c{}{class}\" data-name=\"{name}\" {transform} points=\"",
                line.run
            );
            let mut before: Option<f64> = None;
            for (x, y) in &points {
                if let Some(before) = before.filter(|_| self.stairs) {
                    let _ = write!(svg, "{x:.decimals$},{} ", exact(before));
                }
                let _ = write!(svg, "{x:.decimals$},{} ", exact(*y));
                before = Some(*y);
            }
            svg.push_str("\"/>");
            // A point by itself is no line.
            if line.style == Style::HeldOut || points.len() == 1 {
                let _ = write!(svg, "<path class=\"dots c{}\" {transform} d=\"", line.run);
                for (x, y) in &points {
                    let _ = write!(svg, "M{x:.decimals$} {}h0", exact(*y));
                }
                svg.push_str("\"/>");
            }
        }
        svg.push_str("</svg>");
    }
}

/// Five digits that count, whatever the size.
fn exact(value: f64) -> String {
    if value == 0.0 {
        return "0".to_string();
    }
    let before = value.abs().max(1e-300).log10().floor() as i32;
    match 4 - before {
        places @ 0..=9 => {
            let text = format!("{value:.*}", places as usize);
            match text.contains('.') {
                true => text.trim_end_matches('0').trim_end_matches('.').to_string(),
                false => text,
            }
        }
        _ => format!("{value:.4e}"),
    }
}

/// Weights of the mean fall by this much a point. TensorBoard smooths so, too.
const KEPT: f64 = 0.9;

/// The line without its noise. None of few points.
pub fn smoothed(points: &[Point]) -> Option<Vec<Point>> {
    const LEAST: usize = 30;
    let (mut sum, mut weight) = (0.0, 0.0);
    let mean = |point: &Point| {
        sum = KEPT * sum + (1.0 - KEPT) * point.y;
        weight = KEPT * weight + 1.0 - KEPT;
        Point { y: sum / weight, ..*point }
    };
    (points.len() >= LEAST).then(|| points.iter().map(mean).collect())
}

/// A range that is not empty.
fn wider((low, high): (f64, f64)) -> (f64, f64) {
    if high > low {
        return (low, high);
    }
    let by = if low == 0.0 { 1.0 } else { low.abs() * 0.1 };
    (low - by, high + by)
}

/// At most `2 * pieces` points: the least and the largest of each piece, in their order. No peak is
/// lost.
fn thinned(points: &[(f64, f64)], pieces: usize) -> Vec<(f64, f64)> {
    if points.len() <= 2 * pieces {
        return points.to_vec();
    }
    let mut kept = Vec::with_capacity(2 * pieces);
    for piece in points.chunks(points.len().div_ceil(pieces)) {
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

    /// Units of the data become those of the drawing.
    fn transform(&self) -> String {
        let x = (WIDTH - LEFT - RIGHT) / (self.x1 - self.x0);
        let y = (HEIGHT - TOP - BOTTOM) / (self.y1 - self.y0);
        let (left, bottom) = (LEFT - self.x0 * x, HEIGHT - BOTTOM + self.y0 * y);
        format!("transform=\"matrix({x:e} 0 0 {:e} {left:e} {bottom:e})\"", -y)
    }

    fn axes(&self, svg: &mut String, axis: &str, log: bool) {
        let (right, bottom) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
        let side = match log {
            true => decades(self.y0, self.y1),
            false => labelled(ticks(self.y0, self.y1, 4)),
        };
        for (y, text) in side {
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

    fn mark(&self, svg: &mut String, mark: &Mark, axis: Axis) {
        let (x, bottom) = (self.x(mark.at.on(axis)), HEIGHT - BOTTOM);
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

/// Places of a logarithmic axis: 1, 2 and 5 times powers of ten; of a narrow range round numbers.
fn decades(low: f64, high: f64) -> Vec<(f64, String)> {
    let powers = (low.floor() as i32)..=(high.ceil() as i32);
    let all = powers.flat_map(|power| [1.0, 2.0, 5.0].map(|times| times * 10_f64.powi(power)));
    let places: Vec<f64> = all.filter(|y| (low..=high).contains(&y.log10())).collect();
    let places = match places.len() {
        0..3 => ticks(10_f64.powf(low), 10_f64.powf(high), 4),
        many => places.into_iter().step_by(many.div_ceil(9)).collect(),
    };
    labelled(places).into_iter().map(|(y, text)| (y.log10(), text)).collect()
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
        let kept = thinned(&points, PIECES);
        assert!(kept.len() <= 2 * PIECES, "{}", kept.len());
        assert!(kept.contains(&(4321.0, 9.0)) && kept.contains(&(8765.0, -9.0)));
        assert!(kept.windows(2).all(|pair| pair[0].0 < pair[1].0));
    }

    fn chart(points: Vec<Point>, main: bool) -> String {
        let axes = vec![Axis::Step, Axis::Tokens, Axis::Time(60.0, "minutes")];
        let lines = vec![Line { run: 0, name: "a<b".to_string(), style: Style::Plain, points }];
        let (title, about) = ("T", "");
        let marks = Vec::new();
        let chart =
            Chart { title, about, axes, lines, marks, from_zero: false, stairs: false, main };
        chart.draw()
    }

    #[test]
    fn one_value_is_a_dot() {
        let svg = chart(vec![Point { step: 1.0, y: 0.0, ..Point::default() }], false);
        assert!(svg.contains("M1 0h0") && !svg.contains("NaN") && !svg.contains("inf"), "{svg}");
    }

    #[test]
    fn points_are_the_values_on_each_axis_and_both_scales() {
        let point = |step: f64, y: f64| {
            Point { step, tokens: step * 512.0, seconds: step * 90.0, y }
        };
        let svg = chart(vec![point(1.0, 10.0), point(2.0, 1.23456), point(3.0, 0.01)], true);
        assert_eq!(svg.matches("<svg").count(), 6);
        for found in [
            "points=\"1,10 2,1.2346 3,0.01 \"", "points=\"512,10 1024,1.2346 1536,0.01 \"",
            "points=\"1.50,10 3.00,1.2346 4.50,0.01 \"", "1,1 2,0.091512 3,-2 ",
            "data-name=\"a&lt;b\"", "class=\"chart x1 log\"", ">minutes<", ">0.05<",
        ] {
            assert!(svg.contains(found), "{found} in {svg}");
        }
        // A number that is not positive has no logarithm.
        assert_eq!(chart(vec![point(1.0, 0.0), point(2.0, 1.0)], true).matches("<svg").count(), 3);
    }

    #[test]
    fn numbers_are_exact_to_five_digits() {
        let cases = [
            (0.0, "0"), (2.648, "2.648"), (123_456.7, "1.2346e5"), (12_345.6, "12346"),
            (3.0e-4, "0.0003"), (1.234_567e-7, "1.2346e-7"), (-1.5, "-1.5"),
        ];
        for (value, expected) in cases {
            assert_eq!(exact(value), expected);
        }
    }

    #[test]
    fn a_smooth_line_follows_and_has_no_noise() {
        let noisy = |x: u32| Point {
            step: f64::from(x),
            y: 2.0 + if x.is_multiple_of(2) { 1.0 } else { -1.0 },
            ..Point::default()
        };
        let all: Vec<Point> = (0..200).map(noisy).collect();
        let smooth = smoothed(&all).expect("enough points");
        assert!(smooth[100..].iter().all(|point| (point.y - 2.0).abs() < 0.1));
        assert_eq!(smooth[7].step, 7.0);
        assert_eq!(smoothed(&all[..29]), None);
    }
}
