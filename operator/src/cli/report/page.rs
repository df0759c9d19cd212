//! The page: a table of runs, charts over steps, time, routers, heat maps, what happened.

use super::chart::{Chart, Line, Mark};
use super::heat;
use super::read::{Event, Run, Step};
use super::{escaped, short};
use std::fmt::Write;

/// One a run; the first is read best.
const COLOURS: [&str; super::RUNS_MAX] = [
    "#1f5fa8", "#c2410c", "#15803d", "#7e22ce", "#a16207", "#0e7490", "#be185d", "#4b5563",
];
/// Rows of the table of happenings.
const EVENTS_SHOWN: usize = 200;
/// What a person wants to know of a run; the rest is in events.jsonl.
const TOLD: [&str; 16] = [
    "AttemptStarted", "WorkerLost", "EngineLost", "Recovered", "Resumed", "CheckpointRefused",
    "CheckpointDegraded", "CheckpointRecovered", "DataDegraded", "DataRecovered", "Warning",
    "JobCompleted", "JobFailed", "JobSuspended", "Interrupted", "SpecChanged",
];

pub fn page(runs: &[Run]) -> String {
    let names: Vec<String> = runs.iter().map(|run| escaped(&run.name)).collect();
    let mut html = format!(
        "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\
         <title>{}</title><style>{}</style></head><body>\n<h1>{}</h1>\n",
        names.join(", "),
        style(),
        names.join(", ")
    );
    html.push_str(&summary(runs));
    section(&mut html, "Training", "", &training(runs));
    section(&mut html, "The machine", MACHINE, &machine(runs));
    section(&mut html, "Routers", "", &routers(runs));
    for run in runs {
        let maps = heat::draw(run, runs.len());
        if !maps.is_empty() {
            let title = format!("Load of the experts: {}", escaped(&run.name));
            section(&mut html, &title, &legend(), &maps);
        }
    }
    for run in runs {
        let title = format!("What happened: {}", escaped(&run.name));
        section(&mut html, &title, "", &happenings(run));
    }
    html.push_str("</body></html>\n");
    html
}

fn section(html: &mut String, title: &str, about: &str, body: &str) {
    if !body.is_empty() {
        let about = if about.is_empty() { String::new() } else { format!("<p>{about}</p>") };
        let _ = write!(
            html,
            "<section><h2>{title}</h2>{about}<div class=\"grid-of\">{body}</div></section>\n"
        );
    }
}

const MACHINE: &str = "A red triangle is the loss of a worker, a dashed line the beginning of an \
                       attempt; each tells more when you point at it.";

fn legend() -> String {
    let colours = heat::colours();
    let fields: String = colours.iter().enumerate().fold(String::new(), |mut all, (at, _)| {
        let _ = write!(all, "<i class=\"h{at}\"></i>");
        all
    });
    format!(
        "A row is an expert, a column some steps. No tokens {fields} three times the mean and more."
    )
}

fn summary(runs: &[Run]) -> String {
    let mut html = "<section><div class=\"wide\"><table><tr><th>run</th><th>steps</th>\
                    <th>loss</th><th>best held-out</th><th>tokens</th><th>tokens/s</th>\
                    <th>attempts</th><th>workers lost</th><th>took</th></tr>"
        .to_string();
    for (at, run) in runs.iter().enumerate() {
        let last = run.steps.last();
        let held_out = run.steps.iter().filter_map(|step| Some((step.validation_loss?, step.step)));
        let best = held_out.min_by(|a, b| a.0.total_cmp(&b.0));
        let best = best.map_or("-".to_string(), |(loss, step)| {
            format!("{} at step {step}", short(loss))
        });
        let number = |of: fn(&Step) -> Option<f64>| last.and_then(of).map_or("-".into(), short);
        let count = |kind: &str| run.events.iter().filter(|event| event.event == kind).count();
        let speed = median(run.steps.iter().filter_map(|step| step.tokens_per_second));
        let attempts = run.steps.iter().map(|step| step.attempt).max().unwrap_or(0);
        let _ = write!(
            html,
            "<tr><td class=\"c{at}\">{}</td><td>{}</td><td>{}</td><td>{best}</td><td>{}</td>\
             <td>{}</td><td>{attempts}</td><td>{}</td><td>{}</td></tr>",
            escaped(&run.name),
            last.map_or(0, |step| step.step),
            number(|step| step.loss),
            number(|step| step.tokens),
            speed.map_or("-".into(), short),
            count("WorkerLost"),
            took(run),
        );
    }
    html.push_str("</table></div></section>\n");
    html
}

fn median(values: impl Iterator<Item = f64>) -> Option<f64> {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}

fn took(run: &Run) -> String {
    let times = || run.steps.iter().filter_map(|step| step.at);
    let seconds = times().fold(f64::MIN, f64::max) - times().fold(f64::MAX, f64::min);
    match seconds.max(0.0) as u64 {
        seconds @ 0..60 => format!("{seconds} s"),
        seconds @ 60..3600 => format!("{} min {} s", seconds / 60, seconds % 60),
        seconds => format!("{} h {} min", seconds / 3600, seconds / 60 % 60),
    }
}

/// A chart over steps; losses and attempts are marked at the step at which they came.
fn over_steps(
    runs: &[Run],
    title: &'static str,
    about: &'static str,
    of: fn(&Step) -> Option<f64>,
) -> String {
    let lines = runs.iter().enumerate().map(|(at, run)| {
        let point = |step: &Step| Some((step.step as f64, of(step).filter(|y| y.is_finite())?));
        Line { run: at, points: run.steps.iter().filter_map(point).collect() }
    });
    let (lines, marks) = (lines.collect(), Vec::new());
    Chart { title, about, axis: "step", lines, marks, from_zero: false, stairs: false }.draw()
}

fn training(runs: &[Run]) -> String {
    [
        over_steps(runs, "Loss", "nats a token", |step| step.loss),
        over_steps(runs, "Held-out loss", "nats a token", |step| step.validation_loss),
        over_steps(runs, "Learning rate", "", |step| step.learning_rate),
        over_steps(runs, "Gradient norm", "before clipping", |step| step.grad_norm),
        over_steps(runs, "Loss scale", "of fp16", |step| step.loss_scale),
    ]
    .concat()
}

fn machine(runs: &[Run]) -> String {
    let speed = over_steps(runs, "Tokens a second", "while a step lasts", |step| {
        step.tokens_per_second
    });
    let about = "% of a step, of the steps that were looked at";
    let waits = over_steps(runs, "Waiting for other ranks", about, |step| {
        Some(100.0 * step.communication.as_ref()?.exposed_share?)
    });
    // Each run from its own beginning.
    let begin = |run: &Run| run.world.first().map_or(0.0, |(at, _)| *at);
    let longest = runs.iter().filter_map(|run| Some(run.world.last()?.0 - begin(run)));
    let (unit, axis) = match longest.fold(0.0, f64::max) {
        seconds if seconds < 600.0 => (1.0, "seconds"),
        seconds if seconds < 36_000.0 => (60.0, "minutes"),
        _ => (3600.0, "hours"),
    };
    let (mut lines, mut marks) = (Vec::new(), Vec::new());
    for (at, run) in runs.iter().enumerate() {
        let place = |time: f64| (time - begin(run)) / unit;
        let points = run.world.iter().map(|(time, ranks)| (place(*time), *ranks)).collect();
        lines.push(Line { run: at, points });
        for event in run.events.iter().filter(|event| event.at.is_some()) {
            let lost = event.event == "WorkerLost";
            if lost || event.event == "AttemptStarted" {
                let x = place(event.at.unwrap_or_default()).max(0.0);
                marks.push(Mark { x, lost, title: format!("{}: {}", run.name, told(event)) });
            }
        }
    }
    // What was lost is drawn over what began.
    marks.sort_by_key(|mark| mark.lost);
    let about = "ranks over time";
    let title = "World size";
    let world = Chart { title, about, axis, lines, marks, from_zero: true, stairs: true }.draw();
    [speed, waits, world].concat()
}

fn told(event: &Event) -> String {
    if event.event == "SpecChanged" {
        return format!("from here on {}", event.message);
    }
    let who = event.worker.as_deref().or(event.node.as_deref()).unwrap_or("");
    let what = match event.event.as_str() {
        "AttemptStarted" => format!("attempt {} begins", event.attempt),
        "WorkerLost" => format!("{who} is lost"),
        other => other.to_string(),
    };
    let more = [&event.reason, &event.message].map(String::as_str);
    let more: Vec<&str> = more.into_iter().filter(|more| !more.is_empty()).collect();
    if more.is_empty() { what } else { format!("{what}: {}", more.join(": ")) }
}

fn routers(runs: &[Run]) -> String {
    [
        over_steps(runs, "Load of the busiest expert", "over the mean, worst layer", |step| {
            step.expert_imbalance
        }),
        over_steps(runs, "Auxiliary loss", "unscaled", |step| step.aux_loss),
        over_steps(runs, "Z loss", "unscaled", |step| step.z_loss.filter(|loss| *loss != 0.0)),
        over_steps(runs, "Router entropy", "nats", |step| step.router_entropy),
        over_steps(runs, "Switches of experts", "share of choices, token to token", |step| {
            step.expert_switches
        }),
        over_steps(runs, "Churn", "share of held-out tokens with another favourite", |step| {
            step.churn
        }),
        over_steps(runs, "Dropped choices", "share", |step| {
            step.dropped_tokens.filter(|share| *share > 0.0)
        }),
        over_steps(runs, "Tokens without an expert", "share", |step| {
            step.unrouted_tokens.filter(|share| *share > 0.0)
        }),
    ]
    .concat()
}

fn happenings(run: &Run) -> String {
    let told_of: Vec<&Event> =
        run.events.iter().filter(|event| TOLD.contains(&event.event.as_str())).collect();
    if told_of.is_empty() {
        return String::new();
    }
    let mut html = "<div class=\"wide\"><table><tr><th>time</th><th>attempt</th><th>step</th>\
                    <th>what</th></tr>"
        .to_string();
    let left_out = told_of.len().saturating_sub(EVENTS_SHOWN);
    for event in told_of.iter().take(EVENTS_SHOWN) {
        let step = event.step.map_or(String::new(), |step| step.to_string());
        let class = if event.event.ends_with("Lost") { " class=\"bad\"" } else { "" };
        let _ = write!(
            html,
            "<tr{class}><td>{}</td><td>{}</td><td>{step}</td>\
             <td class=\"what\">{}</td></tr>",
            escaped(&event.time.replace('T', " ")),
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

fn style() -> String {
    let mut css = "body{font:15px/1.4 system-ui,sans-serif;color:#1b1f24;background:#fff;\
        margin:0 auto;max-width:1320px;padding:12px}\
        h1{font-size:1.4em;overflow-wrap:anywhere}h2{font-size:1.1em;margin:1.2em 0 .3em;\
        overflow-wrap:anywhere}p{margin:.2em 0 .6em;color:#57606a}\
        .grid-of{display:grid;gap:14px;grid-template-columns:repeat(auto-fill,\
        minmax(min(100%,380px),1fr))}\
        figure{margin:0;min-width:0}figcaption{color:#57606a;font-size:.9em}\
        figcaption b{color:#1b1f24}figure span{display:block;font-size:.85em}\
        svg{display:block;width:100%;height:auto}.heat svg{border:1px solid #d0d7de}\
        svg text{font-size:11px;fill:#57606a}.side{text-anchor:end}.below{text-anchor:middle}\
        .grid{stroke:#e6e9ec;fill:none}\
        polyline{fill:none;stroke:currentColor;stroke-width:1.3;stroke-linejoin:round}\
        .begun path{stroke:#8c959f;stroke-dasharray:4 3}\
        .lost path{stroke:#cf222e;stroke-width:1.2}.lost .full{fill:#cf222e}\
        .wide{overflow-x:auto;grid-column:1/-1}table{border-collapse:collapse}\
        th,td{text-align:left;padding:3px 12px 3px 0;border-bottom:1px solid #e6e9ec;\
        vertical-align:top;white-space:nowrap}th{font-weight:600}\
        .what{white-space:normal;min-width:16em}.bad td{color:#cf222e}\
        i{display:inline-block;width:12px;height:12px;margin:0 1px -2px}"
        .to_string();
    for (at, colour) in COLOURS.iter().enumerate() {
        let _ = write!(css, ".c{at}{{color:{colour}}}");
    }
    for (at, colour) in heat::colours().iter().enumerate() {
        let _ = write!(css, ".h{at}{{fill:{colour};background:{colour}}}");
    }
    css
}
