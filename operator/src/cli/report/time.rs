//! Where the time of a run went.
//!
//! ```text
//! steps with their durations x starts, losses, ends --Times::of--> spans of one kind each
//! ```
//! Between two starts of the program nothing ran: that is no time of the run.

use super::read::Event;

/// A step that was done, whatever became of it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Beat {
    /// Its end, in seconds since 1970.
    pub at: f64,
    /// Its time begins with the end of the one before, or when its attempt began to train.
    pub seconds: f64,
    /// In these of its seconds it waited for data, copies and storage.
    pub waited: f64,
    pub attempt: u32,
    /// It was lost, and done again later.
    pub lost: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Starting,
    Trained,
    Again,
    Waiting,
    Recovering,
}

impl Kind {
    pub const ALL: [Kind; 5] =
        [Kind::Trained, Kind::Again, Kind::Waiting, Kind::Recovering, Kind::Starting];

    /// The style knows it by this name.
    pub fn class(self) -> &'static str {
        match self {
            Kind::Starting => "starting",
            Kind::Trained => "trained",
            Kind::Again => "again",
            Kind::Waiting => "waiting",
            Kind::Recovering => "recovering",
        }
    }

    pub fn words(self) -> &'static str {
        match self {
            Kind::Starting => "starting",
            Kind::Trained => "trained, and looked at held-out data",
            Kind::Again => "steps that were lost and done again",
            Kind::Waiting => "waiting for data, copies of the state and storage",
            Kind::Recovering => "recovering, and taking in workers",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Span {
    /// Seconds of the run, without its pauses.
    pub from: f64,
    pub to: f64,
    pub kind: Kind,
}

/// The time of a run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Times {
    /// Seconds since 1970.
    begin: f64,
    /// In which no program ran, by the clock.
    pauses: Vec<(f64, f64)>,
    /// One behind the other, of other kinds.
    pub spans: Vec<Span>,
}

/// Each of these ends a start of the program.
const ENDS: [&str; 4] = ["JobCompleted", "JobFailed", "JobSuspended", "Interrupted"];
const LOSSES: [&str; 2] = ["WorkerLost", "EngineLost"];

impl Times {
    /// The times that follow from steps and events, which are in their order.
    pub fn of(beats: &[Beat], events: &[Event]) -> Times {
        let begins = events.iter().filter_map(|event| event.at).next();
        let first = beats.first().map(|beat| beat.at - beat.seconds);
        let begin = begins.into_iter().chain(first).fold(f64::MAX, f64::min);
        if begin == f64::MAX {
            return Times::default();
        }
        let mut times = Times { begin, pauses: pauses(beats, events), spans: Vec::new() };
        let losses: Vec<f64> = events
            .iter()
            .filter(|event| LOSSES.contains(&event.event.as_str()))
            .filter_map(|event| event.at)
            .collect();
        let (mut cursor, mut attempt) = (begin, None);
        for beat in beats {
            let from = (beat.at - beat.seconds).max(cursor);
            if beat.at <= cursor {
                continue;
            }
            let grows = attempt.is_some_and(|attempt| attempt != beat.attempt);
            times.gap((cursor, from), attempt.is_none(), grows, &losses);
            let waited = beat.waited.min(beat.at - from);
            times.put(from, from + waited, Kind::Waiting);
            let kind = if beat.lost { Kind::Again } else { Kind::Trained };
            times.put(from + waited, beat.at, kind);
            (cursor, attempt) = (beat.at, Some(beat.attempt));
        }
        let ended = events.iter().rev().find(|event| ENDS.contains(&event.event.as_str()));
        if let Some(end) = ended.and_then(|event| event.at).filter(|end| *end > cursor) {
            times.gap((cursor, end), attempt.is_none(), false, &losses);
        }
        times
    }

    /// Time between steps.
    fn gap(&mut self, (from, to): (f64, f64), is_first: bool, grows: bool, losses: &[f64]) {
        let within = |pause: &&(f64, f64)| pause.0 >= from && pause.1 <= to;
        let pauses: Vec<(f64, f64)> = self.pauses.iter().filter(within).copied().collect();
        let lost = |from: f64, to: f64| losses.iter().any(|at| (from..=to).contains(at));
        let mut from = from;
        for (at, (pause, resumes)) in pauses.iter().enumerate() {
            let kind = match lost(from, *pause) {
                true => Kind::Recovering,
                false if is_first || at > 0 => Kind::Starting,
                false => Kind::Waiting,
            };
            self.put(from, *pause, kind);
            from = *resumes;
        }
        let kind = match lost(from, to) || (grows && pauses.is_empty()) {
            true => Kind::Recovering,
            false if is_first || !pauses.is_empty() => Kind::Starting,
            false => Kind::Waiting,
        };
        self.put(from, to, kind);
    }

    fn put(&mut self, from: f64, to: f64, kind: Kind) {
        let (from, to) = (self.seconds(from), self.seconds(to));
        match self.spans.last_mut() {
            _ if to <= from => {}
            Some(last) if last.kind == kind => last.to = to,
            _ => self.spans.push(Span { from, to, kind }),
        }
    }

    /// The run has so many seconds until this moment, without its pauses.
    pub fn seconds(&self, at: f64) -> f64 {
        let past = |(from, to): &(f64, f64)| (at.min(*to) - from).max(0.0);
        (at - self.begin - self.pauses.iter().map(past).sum::<f64>()).max(0.0)
    }

    pub fn all(&self) -> f64 {
        self.spans.last().map_or(0.0, |span| span.to)
    }

    pub fn sum(&self, kind: Kind) -> f64 {
        let of = self.spans.iter().filter(|span| span.kind == kind);
        of.map(|span| span.to - span.from).sum()
    }
}

/// From the end of each start, or what is known of it last, to the next start.
fn pauses(beats: &[Beat], events: &[Event]) -> Vec<(f64, f64)> {
    let mut last = f64::MIN;
    let mut ended = None;
    let mut pauses: Vec<(f64, f64)> = Vec::new();
    let mut beats = beats.iter().peekable();
    for event in events {
        let Some(at) = event.at else { continue };
        while let Some(beat) = beats.next_if(|beat| beat.at <= at) {
            last = last.max(beat.at);
        }
        let starts = event.event == "RunStarted"
            || event.event == "AttemptStarted" && ended.is_some();
        let from = ended.unwrap_or(last);
        if starts && from > f64::MIN && at > from {
            pauses.push((from, at));
            ended = None;
        } else if ENDS.contains(&event.event.as_str()) {
            ended = Some(at);
        }
        last = last.max(at);
    }
    pauses
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(at: f64, event: &str) -> Event {
        Event { at: Some(at), event: event.to_string(), ..Event::default() }
    }

    /// `KIND FROM-TO` of each span.
    fn told(times: &Times) -> String {
        let of = |span: &Span| format!("{} {:.0}-{:.0}", span.kind.class(), span.from, span.to);
        times.spans.iter().map(of).collect::<Vec<_>>().join(", ")
    }

    fn beat(at: f64, seconds: f64, attempt: u32) -> Beat {
        Beat { at, seconds, attempt, ..Beat::default() }
    }

    #[test]
    fn time_is_divided_by_what_it_went_to() {
        let check = |beats: &[Beat], events: &[Event], expected: &str| {
            assert_eq!(told(&Times::of(beats, events)), expected);
        };
        // A start, steps that wait for storage, a loss, a step that is done again, growth, an end.
        let lost = Beat { lost: true, ..beat(130.0, 10.0, 1) };
        let waits = Beat { waited: 4.0, ..beat(120.0, 10.0, 1) };
        let beats =
            [beat(110.0, 5.0, 1), waits, lost, beat(150.0, 10.0, 2), beat(165.0, 10.0, 3)];
        let events = [
            event(100.0, "RunStarted"), event(101.0, "AttemptStarted"), event(133.0, "WorkerLost"),
            event(134.0, "AttemptStarted"), event(152.0, "AttemptStarted"),
            event(170.0, "JobCompleted"),
        ];
        check(
            &beats,
            &events,
            "starting 0-5, trained 5-10, waiting 10-14, trained 14-20, again 20-30, recovering \
             30-40, trained 40-50, recovering 50-55, trained 55-65, waiting 65-70",
        );
        // Interrupted, and started the next day; then killed, and started once more.
        let day = 86_400.0;
        let beats = [beat(20.0, 10.0, 1), beat(day + 40.0, 30.0, 2), beat(2.0 * day, 1.0, 3)];
        let events = [
            event(5.0, "AttemptStarted"), event(22.0, "Interrupted"), event(day, "RunStarted"),
            event(day + 1.0, "AttemptStarted"), event(2.0 * day - 9.0, "RunStarted"),
        ];
        check(
            &beats,
            &events,
            "starting 0-5, trained 5-15, waiting 15-17, starting 17-27, trained 27-57, starting \
             57-65, trained 65-66",
        );
        let times = Times::of(&beats, &events);
        assert_eq!((times.seconds(day + 10.0), times.all()), (27.0, 66.0));
        assert_eq!(times.sum(Kind::Trained), 41.0);
        // Releases without a word on their starts.
        let events = [
            event(0.0, "AttemptStarted"), event(22.0, "Interrupted"),
            event(day, "AttemptStarted"), event(day + 1.0, "Resumed"),
        ];
        check(
            &beats[..2],
            &events,
            "starting 0-10, trained 10-20, waiting 20-22, starting 22-32, trained 32-62",
        );
        check(&beats[..1], &[], "trained 0-10");
        check(&[], &[], "");
    }
}
