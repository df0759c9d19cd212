//! The page: facts of runs, charts, where the time went, heat maps, what happened.

use super::chart::{Axis, Chart, Line, Mark, Point, Style, smoothed};
use super::facts::{self, Row};
use super::heat;
use super::read::{Run, Step};
use super::short;
use super::time::{Kind, Span};
use super::words::{is_told, recoveries, span, told};
use moejob_offline::page::{self, escaped};
use std::fmt::Write;

/// Rows of the table of happenings.
const EVENTS_SHOWN: usize = 200;
/// Rows of the table of recoveries.
const RECOVERIES_SHOWN: usize = 200;
/// Parts of a timeline: what is shorter than one of so many is not seen, but for recoveries.
const PIECES: f64 = 1000.0;
/// Recoveries that a timeline shows, whatever their length.
const MARKED_MAX: usize = 500;
/// Characters of the names of runs in the title.
const TITLE_CHARS_MAX: usize = 300;

/// The page of runs; `price` is what a node costs an hour, where it is given.
pub fn page(runs: &[Run], price: Option<f64>) -> String {
    let names: Vec<&str> = runs.iter().map(|run| run.name.as_str()).collect();
    let title: String = names.join(", ").chars().take(TITLE_CHARS_MAX).collect();
    let mut html = String::new();
    section(&mut html, "Results", "", &table(runs, &facts::results(runs, price), true));
    html.push_str(CONTROLS);
    let axes = axes(runs);
    section(&mut html, "Training", "", &training(runs, &axes));
    section(&mut html, "Where the time went", "", &times(runs));
    section(&mut html, "The machine", MACHINE, &machine(runs, &axes));
    section(&mut html, "Routers", "", &routers(runs, &axes));
    for run in runs {
        let maps = heat::draw(run, runs.len());
        if !maps.is_empty() {
            let about = format!(
                "A row is an expert, a column some steps. No tokens {} three times the mean and \
                 more.",
                heat::legend()
            );
            section(&mut html, &format!("Load of the experts: {}", run.name), &about, &maps);
        }
    }
    for run in runs {
        section(&mut html, &format!("At each checkpoint: {}", run.name), "", &samples(run));
    }
    section(&mut html, "What was trained", "", &table(runs, &facts::trained(runs), false));
    section(&mut html, "Fields that differ", "", &differences(runs));
    for run in runs {
        section(&mut html, &format!("What happened: {}", run.name), "", &happenings(run));
    }
    page::page(&title, &heat::style(), &html, include_str!("page.js"))
}

/// Switches of all charts over steps. The style hides what is not chosen; no script is needed.
const CONTROLS: &str = "<p class=\"controls\">below: \
    <label><input type=\"radio\" name=\"axis\" id=\"steps\" checked> steps</label>\
    <label><input type=\"radio\" name=\"axis\" id=\"tokens\"> tokens</label>\
    <label><input type=\"radio\" name=\"axis\" id=\"time\"> time</label>\
    <label><input type=\"checkbox\" id=\"log\"> logarithmic loss</label>\
    <label><input type=\"checkbox\" id=\"smooth\" checked> smoothed</label></p>\n";

const MACHINE: &str = "A red triangle is the loss of a worker, a dashed line the beginning of an \
                       attempt; each tells more when you point at it.";

fn section(html: &mut String, title: &str, about: &str, body: &str) {
    if !body.is_empty() {
        let about = if about.is_empty() { String::new() } else { format!("<p>{about}</p>") };
        let title = escaped(title);
        let _ = write!(
            html,
            "<section><h2>{title}</h2>{about}<div class=\"grid-of\">{body}</div></section>\n"
        );
    }
}

/// A column a run; of two the difference, where they are compared.
fn table(runs: &[Run], rows: &[Row], compared: bool) -> String {
    if rows.is_empty() {
        return String::new();
    }
    let compared = compared && runs.len() == 2;
    let mut html = "<div class=\"wide\"><table>".to_string();
    if runs.len() > 1 {
        html.push_str("<tr><th></th>");
        for (at, run) in runs.iter().enumerate() {
            let _ = write!(html, "<th class=\"c{at}\">{}</th>", escaped(&run.name));
        }
        html.push_str(if compared { "<th>difference</th></tr>" } else { "</tr>" });
    }
    for row in rows {
        let _ = write!(html, "<tr><th>{}</th>", row.name);
        for cell in &row.cells {
            let _ = write!(html, "<td class=\"what\">{}</td>", escaped(&cell.text));
        }
        if let (true, [one, other]) = (compared, &row.cells[..]) {
            let _ = write!(html, "<td>{}</td>", difference(one.number, other.number));
        }
        html.push_str("</tr>");
    }
    html.push_str("</table></div>");
    html
}

/// `-0.1234 (-4.7%)`
fn difference(one: Option<f64>, other: Option<f64>) -> String {
    let Some((one, other)) = one.zip(other) else { return String::new() };
    let by = other - one;
    let sign = if by > 0.0 { "+" } else { "" };
    match one != 0.0 && by != 0.0 {
        true => format!("{sign}{} ({sign}{:.1}%)", short(by), 100.0 * by / one.abs()),
        false => format!("{sign}{}", short(by)),
    }
}

fn differences(runs: &[Run]) -> String {
    let rows = facts::differences(runs);
    if rows.is_empty() {
        return String::new();
    }
    let mut html = "<div class=\"wide\"><table><tr><th>field</th>".to_string();
    for (at, run) in runs.iter().enumerate() {
        let _ = write!(html, "<th class=\"c{at}\">{}</th>", escaped(&run.name));
    }
    html.push_str("</tr>");
    for (field, values) in rows {
        let _ = write!(html, "<tr><td>{}</td>", escaped(&field));
        for value in values {
            let _ = write!(html, "<td class=\"what\">{}</td>", escaped(&value));
        }
        html.push_str("</tr>");
    }
    html.push_str("</table></div>");
    html
}

/// Steps, tokens, and time in the unit in which the longest run is read best.
fn axes(runs: &[Run]) -> Vec<Axis> {
    let longest = runs.iter().map(|run| run.times.all()).fold(0.0, f64::max);
    let time = match longest {
        seconds if seconds < 600.0 => Axis::Time(1.0, "seconds"),
        seconds if seconds < 36_000.0 => Axis::Time(60.0, "minutes"),
        _ => Axis::Time(3600.0, "hours"),
    };
    vec![Axis::Step, Axis::Tokens, time]
}

fn points(run: &Run, of: impl Fn(&Step) -> Option<f64>) -> Vec<Point> {
    let point = |step: &Step| {
        let y = of(step).filter(|y| y.is_finite())?;
        Some(Point {
            step: step.step as f64,
            tokens: step.tokens.unwrap_or(0.0),
            seconds: step.at.map_or(0.0, |at| run.times.seconds(at)),
            y,
        })
    };
    run.steps.iter().filter_map(point).collect()
}

/// The name of a line tells its run where there are several.
fn named(runs: &[Run], run: &Run, what: &str) -> String {
    match runs.len() {
        1 => what.to_string(),
        _ => format!("{} {what}", run.name),
    }
}

/// A chart over steps, tokens or time.
fn over_steps(
    runs: &[Run],
    axes: &[Axis],
    title: &'static str,
    about: &'static str,
    of: fn(&Step) -> Option<f64>,
) -> String {
    let lines = runs.iter().enumerate().map(|(at, run)| Line {
        run: at,
        name: if runs.len() == 1 { title.to_lowercase() } else { run.name.clone() },
        style: Style::Plain,
        points: points(run, of),
    });
    let (axes, lines, marks) = (axes.to_vec(), lines.collect(), Vec::new());
    let (from_zero, stairs, main) = (false, false, false);
    Chart { title, about, axes, lines, marks, from_zero, stairs, main }.draw()
}

/// Loss of training and of held-out data, of all runs.
fn losses(runs: &[Run], axes: &[Axis]) -> String {
    let (mut lines, mut marks) = (Vec::new(), Vec::new());
    for (at, run) in runs.iter().enumerate() {
        let mut put = |what: &str, style, points: Vec<Point>| {
            // A run by itself has a colour more.
            let of = if runs.len() == 1 && style == Style::HeldOut { 1 } else { at };
            if !points.is_empty() {
                lines.push(Line { run: of, name: named(runs, run, what), style, points });
            }
        };
        let trained = points(run, |step| step.loss);
        let smooth = smoothed(&trained);
        put("train", if smooth.is_some() { Style::Raw } else { Style::Plain }, trained);
        put("smoothed", Style::Smooth, smooth.unwrap_or_default());
        put("held out", Style::HeldOut, points(run, |step| step.validation_loss));
        let steered = run.events.iter().filter(|event| event.event == "SpecChanged");
        for event in steered {
            let step = event.step.unwrap_or(0);
            let Some(place) = run.steps.iter().find(|place| place.step >= step) else { continue };
            let title = format!("{}: from step {step} on {}", run.name, event.message);
            let seconds = place.at.map_or(0.0, |at| run.times.seconds(at));
            let tokens = place.tokens.unwrap_or(0.0);
            marks.push(Mark {
                at: Point { step: step as f64, tokens, seconds, y: 0.0 },
                lost: false,
                title,
            });
        }
    }
    let (title, about, axes) = ("Loss", "nats a token", axes.to_vec());
    let (from_zero, stairs, main) = (false, false, true);
    Chart { title, about, axes, lines, marks, from_zero, stairs, main }.draw()
}

fn training(runs: &[Run], axes: &[Axis]) -> String {
    [
        losses(runs, axes),
        over_steps(runs, axes, "Learning rate", "", |step| step.learning_rate),
        over_steps(runs, axes, "Gradient norm", "before clipping", |step| step.grad_norm),
        over_steps(runs, axes, "Loss scale", "of fp16", |step| step.loss_scale),
    ]
    .concat()
}

/// For each run a bar of what its time went to, a timeline, and its recoveries.
fn times(runs: &[Run]) -> String {
    let mut html = String::new();
    for (at, run) in runs.iter().enumerate().filter(|(_, run)| run.times.all() > 0.0) {
        let all = run.times.all();
        let _ = write!(html, "<div class=\"wide\"><b class=\"c{at}\">{}</b>", escaped(&run.name));
        html.push_str("<div class=\"bar\">");
        let mut legend = String::new();
        for kind in Kind::ALL {
            let seconds = run.times.sum(kind);
            if seconds > 0.0 {
                let (share, class) = (100.0 * seconds / all, kind.class());
                let told = format!("{} {share:.1}%, {}", kind.words(), span(seconds));
                let _ = write!(
                    html,
                    "<b class=\"{class}\" style=\"width:{share:.3}%\" title=\"{told}\"></b>"
                );
                let _ = write!(legend, "<span><i class=\"{class}\"></i>{told}</span>");
            }
        }
        let strip = strip(&run.times.spans, all);
        let _ = write!(
            html,
            "</div><figure class=\"strip\">{strip}<figcaption>from the beginning to {}, without \
             pauses between starts</figcaption>{legend}</figure>{}</div>",
            span(all),
            recovered(run)
        );
    }
    html
}

fn strip(spans: &[Span], all: f64) -> String {
    let mut svg = format!(
        "<svg viewBox=\"0 0 {PIECES} 20\" preserveAspectRatio=\"none\" role=\"img\">\
         <rect class=\"trained\" width=\"{PIECES}\" height=\"20\"/>"
    );
    let mut marked = 0;
    for part in spans.iter().filter(|part| part.kind != Kind::Trained) {
        let (from, width) = (part.from / all * PIECES, (part.to - part.from) / all * PIECES);
        let is_marked = part.kind == Kind::Recovering && marked < MARKED_MAX;
        marked += usize::from(is_marked);
        if width >= 1.0 || is_marked {
            let told = format!("{} {}", part.kind.words(), span(part.to - part.from));
            let _ = write!(
                svg,
                "<rect class=\"{}\" x=\"{from:.1}\" width=\"{:.1}\" height=\"20\">\
                 <title>{told}</title></rect>",
                part.kind.class(),
                width.max(1.5)
            );
        }
    }
    svg.push_str("</svg>");
    svg
}

fn recovered(run: &Run) -> String {
    let all = recoveries(run);
    if all.is_empty() {
        return String::new();
    }
    let mut html = "<table><tr><th>recovered at</th><th>from</th><th>with</th><th>after</th>\
                    <th>done again</th><th>state</th></tr>"
        .to_string();
    for of in all.iter().take(RECOVERIES_SHOWN) {
        let cells = [&span(of.at), &of.why, &of.ranks, &of.took, &of.again, &of.from];
        let cells = cells.map(|cell| format!("<td>{}</td>", escaped(cell)));
        let _ = write!(html, "<tr>{}</tr>", cells.concat());
    }
    html.push_str("</table>");
    if let Some(more) = all.len().checked_sub(RECOVERIES_SHOWN).filter(|more| *more > 0) {
        let _ = write!(html, "<p>and {more} more</p>");
    }
    html
}

fn machine(runs: &[Run], axes: &[Axis]) -> String {
    let speed = over_steps(runs, axes, "Tokens a second", "while a step lasts", |step| {
        step.tokens_per_second
    });
    let about = "% of a step, of the steps that were looked at";
    let waits = over_steps(runs, axes, "Waiting for other ranks", about, |step| {
        Some(100.0 * step.communication.as_ref()?.exposed_share?)
    });
    let watts = over_steps(runs, axes, "Power", "watts of rank 0's GPU", |step| {
        step.device.as_ref()?.watts
    });
    let (mut lines, mut marks) = (Vec::new(), Vec::new());
    for (at, run) in runs.iter().enumerate() {
        let place = |time: f64, y: f64| {
            Point { seconds: run.times.seconds(time), y, ..Point::default() }
        };
        let points = run.world.iter().map(|(time, ranks)| place(*time, *ranks)).collect();
        let name = if runs.len() == 1 { "ranks".to_string() } else { run.name.clone() };
        lines.push(Line { run: at, name, style: Style::Plain, points });
        for event in &run.events {
            let lost = event.event == "WorkerLost";
            if let Some(time) = event.at.filter(|_| lost || event.event == "AttemptStarted") {
                let title = format!("{}: {}", run.name, told(event));
                marks.push(Mark { at: place(time, 0.0), lost, title });
            }
        }
    }
    // What was lost is drawn over what began.
    marks.sort_by_key(|mark| mark.lost);
    let (title, about) = ("World size", "ranks over time");
    let (axes, from_zero) = (axes[2..].to_vec(), true);
    let (stairs, main) = (true, false);
    let world = Chart { title, about, axes, lines, marks, from_zero, stairs, main };
    [speed, waits, watts, world.draw()].concat()
}

fn samples(run: &Run) -> String {
    if run.samples.is_empty() {
        return String::new();
    }
    let row = |(step, text): &(u64, String)| {
        format!("<tr><td>step {step}</td><td class=\"what\">{}</td></tr>", escaped(text))
    };
    let rows: String = run.samples.iter().map(row).collect();
    format!("<div class=\"wide\"><table>{rows}</table></div>")
}

fn happenings(run: &Run) -> String {
    let all = || run.events.iter().filter(|event| is_told(event));
    if all().next().is_none() {
        return String::new();
    }
    let mut html = "<div class=\"wide\"><table><tr><th>time</th><th>attempt</th><th>step</th>\
                    <th>what</th></tr>"
        .to_string();
    let left_out = all().count().saturating_sub(EVENTS_SHOWN);
    for event in all().take(EVENTS_SHOWN) {
        let step = event.step.map_or(String::new(), |step| step.to_string());
        let class = if event.event.ends_with("Lost") { " class=\"bad\"" } else { "" };
        let time = event.time.replace('T', " ");
        let time = time.split('.').next().unwrap_or_default();
        let _ = write!(
            html,
            "<tr{class}><td>{}</td><td>{}</td><td>{step}</td><td class=\"what\">{}</td></tr>",
            escaped(time),
            event.attempt,
            escaped(&told(event)),
        );
    }
    html.push_str("</table>");
    if left_out > 0 {
        let _ = write!(html, "<p>{left_out} more are in events.jsonl.</p>");
    }
    html.push_str("</div>");
    html
}

fn routers(runs: &[Run], axes: &[Axis]) -> String {
    [
        over_steps(runs, axes, "Load of the busiest expert", "over the mean, worst layer", |step| {
            step.expert_imbalance
        }),
        over_steps(runs, axes, "Auxiliary loss", "unscaled", |step| step.aux_loss),
        over_steps(runs, axes, "Z loss", "unscaled", |step| {
            step.z_loss.filter(|loss| *loss != 0.0)
        }),
        over_steps(runs, axes, "Router entropy", "nats", |step| step.router_entropy),
        over_steps(runs, axes, "Switches of experts", "share of choices, token to token", |step| {
            step.expert_switches
        }),
        over_steps(runs, axes, "Churn", "share of held-out tokens with another favourite", |step| {
            step.churn
        }),
        over_steps(runs, axes, "Dropped choices", "share", |step| {
            step.dropped_tokens.filter(|share| *share > 0.0)
        }),
        over_steps(runs, axes, "Tokens without an expert", "share", |step| {
            step.unrouted_tokens.filter(|share| *share > 0.0)
        }),
    ]
    .concat()
}
