//! What a person sees while a job runs: one line that changes on a terminal, plain lines in a pipe.

mod rate;

use moejob_protocol::message::Loading;
use moejob_plan::placement::gib;
use moejob_protocol::communication::CommunicationReport;
use moejob_protocol::report::{DeviceReport, Phases, StepReport};
use rate::{Rate, STEPS_MEASURED};
use crate::cli::out::{self, Colour, columns, painted, within};
use jiff::Zoned;
use std::io::Write;
use std::time::{Duration, Instant};

/// In a pipe, at most one line in this time; a line with a held-out loss always appears.
const PLAIN_LINE_EVERY: Duration = Duration::from_secs(2);
/// In a pipe, the same of lines that tell how far the data are read.
const PLAIN_LOADING_EVERY: Duration = Duration::from_millis(400);
/// A terminal's line is redrawn at most this often.
const REDRAW_EVERY: Duration = Duration::from_millis(50);

/// Phases that a line names.
const PHASES_SHOWN: usize = 3;

/// Writes progress to standard output and notes to standard error.
pub struct Progress {
    screen: Screen,
    terminal: bool,
    steps: u64,
    drawn: Option<Instant>,
    line: Line,
    rate: Rate,
    /// What travelled in the newest step that was looked at.
    exposed: Option<CommunicationReport>,
    /// The time that is left was told.
    told: bool,
    /// Seconds of all steps of this start, by what they went to.
    parts: [(&'static str, f64); 10],
}

impl Progress {
    pub fn new(steps: u64) -> Progress {
        Progress::on(steps, Screen::of_process())
    }

    fn on(steps: u64, screen: Screen) -> Progress {
        let terminal = (screen.columns)().is_some();
        let (line, rate) = (Line::default(), Rate::default());
        let (drawn, exposed, told) = (None, None, false);
        let parts = Phases::default().parts();
        Progress { screen, terminal, steps, drawn, line, rate, exposed, told, parts }
    }

    /// A step is done.
    pub fn step(&mut self, report: &StepReport) {
        self.rate.push(report.step, Instant::now());
        let parts = self.parts.iter_mut().zip(report.timing.phases.parts());
        parts.for_each(|(all, (_, seconds))| all.1 += seconds);
        if report.communication.is_some() || report.world_size == 1 {
            self.exposed.clone_from(&report.communication);
        }
        let left = self.rate.left(self.steps);
        self.line = describe(report, self.exposed.as_ref(), (self.steps, left));
        let last = report.step >= self.steps;
        let waited = self.drawn.map(|at| at.elapsed());
        if self.terminal {
            // What stays on the screen is drawn, however soon after the line before.
            let stays = report.validation_loss.is_some();
            if last || stays || waited.is_none_or(|waited| waited >= REDRAW_EVERY) {
                self.redraw();
            }
            if stays {
                self.keep();
            }
        } else if last
            || report.validation_loss.is_some()
            || waited.is_none_or(|waited| waited >= PLAIN_LINE_EVERY)
        {
            self.drawn = Some(Instant::now());
            say(&mut self.screen.out, &self.line.text());
        }
    }

    /// The time that is left, once: as soon as a few steps tell.
    pub fn first_measure(&mut self) -> Option<Duration> {
        if self.told || self.rate.readings() < STEPS_MEASURED {
            return None;
        }
        let left = self.rate.left(self.steps)?;
        self.told = true;
        Some(left)
    }

    /// A worker opens its data.
    pub fn loading(&mut self, worker: &str, loading: &Loading) {
        let Loading { bytes_done, bytes, .. } = *loading;
        let line = format!("{worker} reads the data: {} of {}", size(bytes_done), size(bytes));
        let line = Line::of(line);
        let waited = self.drawn.map(|at| at.elapsed());
        if line == self.line || bytes_done == bytes {
            return;
        }
        if self.terminal {
            self.line = line;
            self.redraw();
        } else if waited.is_none_or(|waited| waited >= PLAIN_LOADING_EVERY) {
            self.drawn = Some(Instant::now());
            say(&mut self.screen.out, &line.text());
            self.line = line;
        }
    }

    /// A happening that a person should read, in a line of its own.
    pub fn note(&mut self, text: &str) {
        self.tell(None, text);
    }

    /// It may have to be acted on.
    pub fn warn(&mut self, text: &str) {
        self.tell(Some(Colour::Warning), text);
    }

    /// It goes on after a loss.
    pub fn recovered(&mut self, text: &str) {
        self.tell(Some(Colour::Recovery), text);
    }

    fn tell(&mut self, colour: Option<Colour>, text: &str) {
        if text.is_empty() {
            return;
        }
        // Workers' words stand in it.
        let mut text = moejob_manifest::problem::printable_lines(text);
        if self.terminal {
            show(&mut self.screen.out, "\r\x1b[K");
        }
        if let Some(columns) = (self.screen.note_columns)() {
            text = within(&text, columns);
        }
        let text = match colour.filter(|_| self.screen.colours) {
            Some(colour) => painted(colour, &text),
            None => text,
        };
        say(&mut self.screen.notes, &text);
        if self.terminal && !self.line.is_empty() {
            self.redraw();
        }
    }

    /// `backward 57%, forward 25%, update 16%` of the time of all steps; nothing before the first.
    pub fn shares(&self) -> String {
        of_parts(self.parts)
    }

    /// Leaves the last line on the screen.
    pub fn finish(&mut self) {
        if self.terminal && !self.line.is_empty() {
            self.redraw();
            self.keep();
        }
    }

    fn redraw(&mut self) {
        self.drawn = Some(Instant::now());
        // It may have been made wider or narrower meanwhile.
        let columns = (self.screen.columns)().unwrap_or(usize::MAX);
        let line = self.line.within(columns.saturating_sub(1), self.screen.colours);
        show(&mut self.screen.out, &format!("\r\x1b[K{line}"));
    }

    /// The line stays. A held-out loss that has no room in it stands below it.
    fn keep(&mut self) {
        let columns = (self.screen.columns)().unwrap_or(usize::MAX);
        let below = self.line.below(columns.saturating_sub(1), self.screen.colours);
        show(&mut self.screen.out, &format!("{below}\n"));
        self.line = Line::default();
    }
}

/// The places that words go to. A process has its standard output and its standard error.
struct Screen {
    out: Box<dyn Write>,
    notes: Box<dyn Write>,
    /// The present width of either terminal. It is None where there is no terminal.
    columns: fn() -> Option<usize>,
    note_columns: fn() -> Option<usize>,
    colours: bool,
}

impl Screen {
    fn of_process() -> Screen {
        Screen {
            out: Box::new(std::io::stdout()),
            notes: Box::new(std::io::stderr()),
            columns: || columns(std::io::stdout()),
            note_columns: || columns(std::io::stderr()),
            colours: out::colours() && columns(std::io::stdout()).is_some(),
        }
    }
}

/// On a terminal, which may be gone by now: that must not end the training.
fn show(out: &mut dyn Write, text: &str) {
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}

/// A reader that has gone away (`| head`) must not end the training.
fn say(to: &mut dyn Write, text: &str) {
    let _ = writeln!(to, "{text}");
}

fn size(bytes: u64) -> String {
    match bytes {
        0..10_000_000 => format!("{} KB", bytes / 1000),
        10_000_000..10_000_000_000 => format!("{} MB", bytes / 1_000_000),
        _ => format!("{:.1} GB", bytes as f64 / 1e9),
    }
}

/// A line in parts: what tells least goes first where there is no room for all.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Line(Vec<(Weight, String)>);

/// How much a part tells; the first is never left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Weight {
    Needed,
    Loss,
    HeldOut,
    Left,
    Share,
    Speed,
    End,
    Ranks,
    Device,
    Phases,
    Exposed,
}

impl Line {
    fn of(text: String) -> Line {
        Line(vec![(Weight::Needed, text)])
    }

    fn push(&mut self, weight: Weight, text: String) {
        if !text.is_empty() {
            self.0.push((weight, text));
        }
    }

    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn text(&self) -> String {
        self.0.iter().map(|(_, text)| text.as_str()).collect::<Vec<_>>().join("  ")
    }

    /// As many parts as fit: a line that is longer than the terminal is wide cannot be drawn anew.
    fn kept(&self, columns: usize) -> Line {
        let mut kept = self.clone();
        while kept.text().chars().count() > columns {
            let least = kept.0.iter().map(|(weight, _)| *weight).max();
            match least.filter(|weight| *weight > Weight::Loss) {
                Some(least) => kept.0.retain(|(weight, _)| *weight != least),
                None => break,
            }
        }
        kept
    }

    fn within(&self, columns: usize, colours: bool) -> String {
        let kept = self.kept(columns);
        match kept.text().chars().count() > columns {
            true => kept.text().chars().take(columns).collect(),
            false => kept.painted(colours),
        }
    }

    /// The held-out loss, where there is no room for it in the line.
    fn below(&self, columns: usize, colours: bool) -> String {
        let is_held_out = |line: &Line| -> Line {
            let of = line.0.iter().filter(|(weight, _)| *weight == Weight::HeldOut);
            Line(of.cloned().collect())
        };
        match is_held_out(&self.kept(columns)).is_empty() {
            true if !is_held_out(self).is_empty() => {
                format!("\n  {}", is_held_out(self).painted(colours))
            }
            _ => String::new(),
        }
    }

    fn painted(&self, colours: bool) -> String {
        let part = |(weight, text): &(Weight, String)| match weight {
            Weight::Loss | Weight::HeldOut if colours => painted(Colour::Loss, text),
            _ => text.clone(),
        };
        self.0.iter().map(part).collect::<Vec<_>>().join("  ")
    }
}

/// `waits 12% (dispatch 231 GB/s)`: how much of a step the ops wait for what travels, and how fast
/// the verb is that takes longest of it.
fn of_exposed(of: &CommunicationReport) -> String {
    let among = of.verbs.iter().filter(|(_, verb)| !verb.beside);
    let longest = among.max_by(|(_, a), (_, b)| a.seconds.total_cmp(&b.seconds));
    let rate = longest.and_then(|(name, verb)| Some((name, verb.bytes_per_second()?)));
    let rate = rate.map(|(name, rate)| format!(" ({name} {})", gigabytes(rate)));
    match of.exposed_share {
        share if share < 0.005 => String::new(),
        share => format!("waits {:.0}%{}", 100.0 * share, rate.unwrap_or_default()),
    }
}

/// `231 GB/s`, `4.1 GB/s`, `80 MB/s`, of bytes a second.
pub fn gigabytes(rate: f64) -> String {
    match rate / 1e9 {
        small if small < 0.1 => format!("{:.0} MB/s", rate / 1e6),
        rate if rate < 10.0 => format!("{rate:.1} GB/s"),
        rate => format!("{rate:.0} GB/s"),
    }
}

fn describe(
    report: &StepReport,
    exposed: Option<&CommunicationReport>,
    (steps, left): (u64, Option<Duration>),
) -> Line {
    let mut line = Line::of(format!("step {}/{steps}", report.step));
    line.push(Weight::Loss, format!("loss {:.4}", report.loss));
    // The last step alone is all of it.
    line.push(Weight::Share, format!("{}%", report.step * 100 / steps.max(1)));
    line.push(Weight::Speed, format!("{} tok/s", thousands(report.tokens_per_second)));
    if let Some(device) = &report.device {
        line.push(Weight::Device, of_device(device));
    }
    line.push(Weight::Phases, of_phases(&report.timing.phases));
    line.push(Weight::Exposed, exposed.map(of_exposed).unwrap_or_default());
    if let Some(loss) = report.validation_loss {
        line.push(Weight::HeldOut, format!("held-out {loss:.4}"));
    }
    if let Some(left) = left.filter(|_| report.step < steps) {
        line.push(Weight::Left, format!("{} left", clock(left)));
        line.push(Weight::End, end(left, &Zoned::now()).unwrap_or_default());
    }
    let ranks = if report.world_size == 1 { "rank" } else { "ranks" };
    line.push(Weight::Ranks, format!("{} {ranks}", report.world_size));
    line
}

/// `backward 57%, forward 25%, update 16%`: what took most of the time since the line before.
fn of_phases(phases: &Phases) -> String {
    of_parts(phases.parts())
}

fn of_parts(mut parts: [(&'static str, f64); 10]) -> String {
    let all: f64 = parts.iter().map(|(_, seconds)| seconds).sum();
    parts.sort_by(|(_, a), (_, b)| b.total_cmp(a));
    let large = parts.iter().take(PHASES_SHOWN).filter(|(_, seconds)| *seconds >= 0.05 * all);
    let shown: Vec<String> = large
        .filter(|(_, seconds)| *seconds > 0.0)
        .map(|(name, seconds)| format!("{name} {:.0}%", 100.0 * seconds / all))
        .collect();
    shown.join(", ")
}

/// `535 TFLOP/s (54.1%)  112.0 GiB  650 W`, as far as the device tells.
fn of_device(device: &DeviceReport) -> String {
    let mut text = format!("{:.0} TFLOP/s", device.model_flops_per_second / 1e12);
    if let Some(share) = device.ceiling_share {
        text += &format!(" ({:.1}%)", share * 100.0);
    }
    if let Some(bytes) = device.memory_bytes {
        text += &format!("  {}", gib(bytes));
    }
    if let Some(watts) = device.watts {
        text += &format!("  {watts:.0} W");
    }
    text
}

fn thousands(value: f64) -> String {
    if value >= 1e6 {
        format!("{:.2}M", value / 1e6)
    } else if value >= 1e3 {
        format!("{:.1}k", value / 1e3)
    } else {
        format!("{value:.0}")
    }
}

pub fn clock(left: Duration) -> String {
    let seconds = left.as_secs();
    match seconds / 3600 {
        0 => format!("{}:{:02}", seconds / 60, seconds % 60),
        hours => format!("{hours}:{:02}:{:02}", seconds / 60 % 60, seconds % 60),
    }
}

/// `ends 14:32`, or of another day `ends 2026-12-01 14:32`, in this machine's zone.
pub fn end(left: Duration, now: &Zoned) -> Option<String> {
    let end = now.checked_add(left).ok()?;
    let form = if end.date() == now.date() { "%H:%M" } else { "%Y-%m-%d %H:%M" };
    Some(format!("ends {}", end.strftime(form)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use moejob_protocol::communication::VerbReport;

    #[test]
    fn numbers_are_short() {
        assert_eq!(thousands(950.0), "950");
        assert_eq!(thousands(12_340.0), "12.3k");
        assert_eq!(thousands(2_500_000.0), "2.50M");
        assert_eq!(clock(Duration::from_secs(61)), "1:01");
        assert_eq!(clock(Duration::from_secs(3723)), "1:02:03");
    }

    #[test]
    fn a_line_names_what_takes_time() {
        let phases = Phases {
            forward: 0.25,
            backward: 0.55,
            update: 0.16,
            numbers: 0.02,
            other: 0.02,
            ..Phases::default()
        };
        assert_eq!(of_phases(&phases), "backward 55%, forward 25%, update 16%");
        assert_eq!(of_phases(&Phases::default()), "");
    }

    #[test]
    fn a_line_names_what_a_step_waits_for() {
        let verb = |bytes, seconds, beside| {
            VerbReport { link: "nccl".into(), bytes, seconds, beside }
        };
        let of = |exposed_share, verbs: &[(&str, VerbReport)]| CommunicationReport {
            exposed_share,
            verbs: verbs.iter().map(|(name, of)| (name.to_string(), of.clone())).collect(),
            ..CommunicationReport::default()
        };
        let dispatch = ("dispatch", verb(6_000_000_000, 0.025, false));
        let combine = ("combine", verb(1_000_000_000, 0.25, false));
        let beside = ("allGather", verb(9_000_000_000, 1.0, true));
        let told = of_exposed(&of(0.124, &[dispatch.clone(), beside.clone()]));
        assert_eq!(told, "waits 12% (dispatch 240 GB/s)");
        let told = of_exposed(&of(0.5, &[combine, dispatch]));
        assert_eq!(told, "waits 50% (combine 4.0 GB/s)");
        assert_eq!(of_exposed(&of(0.02, &[beside])), "waits 2%");
        assert_eq!(of_exposed(&of(0.004, &[])), "");
        assert_eq!(gigabytes(80e6), "80 MB/s");
    }

    #[test]
    fn a_gpu_says_what_it_tells() {
        let device = DeviceReport {
            model_flops_per_second: 535.2e12,
            ceiling_share: Some(0.541),
            memory_bytes: Some(112 << 30),
            watts: Some(650.4),
            ..DeviceReport::default()
        };
        assert_eq!(of_device(&device), "535 TFLOP/s (54.1%)  112.0 GiB  650 W");
        let unknown = DeviceReport { model_flops_per_second: 2e12, ..DeviceReport::default() };
        assert_eq!(of_device(&unknown), "2 TFLOP/s");
    }

    fn line() -> Line {
        let mut line = Line::of("step 50/600".to_string());
        line.push(Weight::Loss, "loss 2.6480".to_string());
        line.push(Weight::Share, "8%".to_string());
        line.push(Weight::Speed, "16.1k tok/s".to_string());
        line.push(Weight::Phases, "validation 69%, backward 19%, forward 11%".to_string());
        line.push(Weight::HeldOut, "held-out 2.8248".to_string());
        line.push(Weight::Left, "1:10 left".to_string());
        line.push(Weight::End, "ends 14:32".to_string());
        line.push(Weight::Ranks, "1 rank".to_string());
        line
    }

    #[test]
    fn a_line_is_never_wider_than_its_terminal() {
        let line = line();
        assert_eq!(line.within(200, false), line.text());
        for (columns, expected, below) in [
            (
                84,
                "step 50/600  loss 2.6480  8%  16.1k tok/s  held-out 2.8248  1:10 left  ends 14:32",
                "",
            ),
            (56, "step 50/600  loss 2.6480  8%  held-out 2.8248  1:10 left", ""),
            (44, "step 50/600  loss 2.6480  held-out 2.8248", ""),
            (30, "step 50/600  loss 2.6480", "\n  held-out 2.8248"),
            (8, "step 50/", "\n  held-out 2.8248"),
        ] {
            let fits = expected.chars().count() <= columns;
            assert_eq!(line.within(columns, false) == expected, fits, "{columns}");
            assert_eq!(line.below(columns, false), below, "{columns}");
        }
        let painted = line.within(30, true);
        assert_eq!(painted, "step 50/600  \x1b[36mloss 2.6480\x1b[0m");
        assert_eq!(Line::of("step 1/2".to_string()).below(4, true), "");
    }

    #[test]
    fn the_end_is_told_by_the_clock() {
        let now: jiff::Timestamp = "2026-11-29T23:30:00Z".parse().expect("a time");
        let now = now.to_zoned(jiff::tz::TimeZone::UTC);
        let told = |minutes: u64| end(Duration::from_secs(60 * minutes), &now);
        assert_eq!(told(7).as_deref(), Some("ends 23:37"));
        assert_eq!(told(31).as_deref(), Some("ends 2026-11-30 00:01"));
        assert_eq!(end(Duration::MAX, &now), None);
    }

    /// A place that keeps all that is written to it.
    #[derive(Clone, Default)]
    struct Tape(std::rc::Rc<std::cell::RefCell<Vec<u8>>>);

    impl Write for Tape {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.borrow_mut().write(bytes)
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    /// A run of a person: steps, a held-out loss, a recovery, a warning, an end.
    fn recording(columns: fn() -> Option<usize>, colours: bool) -> String {
        let tape = Tape::default();
        let screen = Screen {
            out: Box::new(tape.clone()),
            notes: Box::new(tape.clone()),
            columns,
            note_columns: columns,
            colours,
        };
        let mut progress = Progress::on(200, screen);
        let step = |step: u64, validation_loss: Option<f64>| StepReport {
            step,
            loss: 2.5,
            validation_loss,
            tokens_per_second: 16_100.0,
            world_size: 4,
            ..StepReport::default()
        };
        progress.note("about 1:10 to go; 200 steps are 1.16 epochs of 1.06 M tokens");
        progress.step(&step(1, None));
        progress.step(&step(50, Some(2.8248)));
        progress.recovered("rank 3 (first-3) was killed: 7 of 8 go on after 2.2 s, 0 steps again");
        progress.warn("the loss has not fallen for 500 steps: 2.31 to 2.32");
        progress.step(&step(200, Some(2.7)));
        progress.finish();
        let text = tape.0.borrow().clone();
        String::from_utf8(text).expect("text")
    }

    /// The lines that stay on a terminal of this width. Nothing is drawn beyond its edge.
    fn seen(recording: &str, columns: usize) -> Vec<String> {
        let (mut lines, mut line) = (Vec::new(), String::new());
        let mut rest = recording.chars().peekable();
        while let Some(c) = rest.next() {
            match c {
                '\n' => lines.push(std::mem::take(&mut line)),
                '\r' => line.clear(),
                '\x1b' => while rest.next().is_some_and(|c| !c.is_ascii_alphabetic()) {},
                c => line.push(c),
            }
            assert!(line.chars().count() < columns, "{columns} columns: {line:?}");
        }
        lines
    }

    #[test]
    fn recordings_at_three_widths_break_no_word_and_wrap_no_line() {
        let widths: [(usize, fn() -> Option<usize>); 3] =
            [(40, || Some(40)), (80, || Some(80)), (160, || Some(160))];
        let plain = recording(|| None, false);
        assert!(!plain.contains(['\r', '\x1b']), "{plain:?}");
        let words: std::collections::BTreeSet<&str> = plain.split_whitespace().collect();
        for (columns, width) in widths {
            let recording = recording(width, true);
            for colour in ["\x1b[36mloss 2.5000\x1b[0m", "\x1b[32mrank 3", "\x1b[33mthe loss"] {
                assert!(recording.contains(colour), "{columns}: {recording:?}");
            }
            let seen = seen(&recording, columns);
            for word in seen.iter().flat_map(|line| line.split_whitespace()) {
                assert!(words.contains(word), "{columns}: {word:?} of {seen:#?}");
            }
            let all = seen.join(" ");
            let all: Vec<&str> = all.split_whitespace().collect();
            let told = all.join(" ");
            for line in [
                "step 50/200 loss 2.5000", "held-out 2.8248", "held-out 2.7000",
                "rank 3 (first-3) was killed: 7 of 8 go on after 2.2 s, 0 steps again",
                "the loss has not fallen for 500 steps: 2.31 to 2.32",
            ] {
                assert!(told.contains(line), "{columns}: {line:?} in {told}");
            }
        }
        let narrow = seen(&recording(|| Some(40), true), 40);
        assert_eq!(narrow[2..7], [
            "step 50/200  loss 2.5000", "  held-out 2.8248",
            "rank 3 (first-3) was killed: 7 of 8 go", "  on after 2.2 s, 0 steps again",
            "the loss has not fallen for 500 steps:",
        ]);
    }
}
