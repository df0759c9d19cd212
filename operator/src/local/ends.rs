//! The begin and the end of a run, told and recorded.

use super::{Runner, words};
use crate::cli::args::word;
use crate::cli::generate::{command_for, command_to_look};
use crate::cli::{VERSION, machine};
use moejob_plan::observed::Outcome;
use moejob_protocol::checkpoint::directory_name;
use moejob_protocol::model::RouterKind;
use moejob_protocol::report::{Detail, EventKind};
use std::path::Path;

impl Runner {
    /// The event tells the command, the program and the machine.
    pub(super) fn tell_start(&mut self) {
        let text = |text: String| Detail::Text(text);
        let mut details = vec![
            ("command", text(command(std::env::args().skip(1)))),
            ("version", text(VERSION.to_string())),
            ("machine", text(machine::words())),
        ];
        details.extend(self.price.map(|price| ("price", Detail::Real(price))));
        self.event(EventKind::RunStarted, "Asked", "", &details);
    }

    pub(super) fn record_outcome(&mut self, outcome: &Outcome) {
        match outcome {
            Outcome::Complete { step } => {
                let details = [("step", Detail::Number(*step))];
                self.event(EventKind::JobCompleted, "AllStepsDone", "", &details);
            }
            Outcome::Failed { reason, message, exit_code } => {
                let details = [("exitCode", Detail::Number(*exit_code as u64))];
                self.event(EventKind::JobFailed, reason, message, &details);
            }
            Outcome::Suspended => self.event(EventKind::JobSuspended, "Asked", "", &[]),
            Outcome::Interrupted => self.event(EventKind::Interrupted, "Asked", "", &[]),
        }
    }

    /// Says how it ended, and what to do next.
    pub(super) fn conclude(&mut self, outcome: &Outcome) -> i32 {
        self.progress.finish();
        self.tell_held(0);
        let shares = self.progress.shares();
        if !shares.is_empty() {
            self.progress.note(&format!("of all the time: {shares}"));
        }
        if let Some(mlflow) = self.mlflow.take() {
            let status = match outcome {
                Outcome::Complete { .. } => "FINISHED",
                Outcome::Failed { .. } => "FAILED",
                Outcome::Suspended | Outcome::Interrupted => "KILLED",
            };
            mlflow.end(status).iter().for_each(|note| self.progress.note(note));
        }
        if let Some(again) = self.words.warnings() {
            self.progress.warn(&again);
        }
        if let Some(why) = self.failing.take() {
            self.progress.warn(&words::of_failing(&why, self.newest()));
        }
        let folder = self.folder.path().display().to_string();
        match outcome {
            Outcome::Complete { step } => {
                let name = directory_name(*step);
                let place = self.location.join(name).display().to_string();
                self.progress.note(&format!("done: the model lies in {place}"));
                // What lies elsewhere is found by its own folder.
                let own = std::path::absolute(self.folder.path());
                let inside = own.is_ok_and(|own| self.location.starts_with(own));
                let of = if inside { self.folder.path() } else { &self.location };
                let program = std::env::args().next().unwrap_or_else(|| "moejob".to_string());
                let router = &self.job.tracker().observed.template.model.router;
                let command = match router.kind {
                    // Its experts choose among all tokens of a text: it cannot be asked to go on.
                    RouterKind::ExpertChoice => command_to_look(&program, self.folder.path()),
                    _ => command_for(&program, of),
                };
                self.progress.note(&format!("try it: {command}"));
                0
            }
            Outcome::Failed { exit_code, message, .. } => {
                self.progress.warn(&format!("failed: {message}"));
                let logs = self.words.logs(&self.folder.logs());
                if !logs.is_empty() {
                    let names = logs.iter().map(|path| path.display().to_string());
                    let names: Vec<String> = names.collect();
                    self.progress.note(&format!("  workers wrote to {}", names.join(", ")));
                }
                *exit_code
            }
            Outcome::Suspended => {
                let words = "spec.suspend is true: nothing is trained. --set suspend=false trains";
                self.progress.note(words);
                0
            }
            Outcome::Interrupted => {
                let stored = self.job.tracker().observed.stored.as_ref();
                let from = stored.map_or("the beginning", |stored| stored.name.as_str());
                self.progress.note(&format!(
                    "interrupted; the same command goes on from {from} in {folder}/checkpoints"
                ));
                130
            }
        }
    }
}

/// The command can be typed again. The address of a log may have a password, and is left out.
fn command(typed: impl Iterator<Item = String>) -> String {
    let mut words = vec!["moejob".to_string()];
    let mut is_secret = false;
    for argument in typed {
        let shown = match (is_secret, argument.starts_with("--mlflow=")) {
            (true, _) => "...".to_string(),
            (false, true) => "--mlflow=...".to_string(),
            (false, false) => word(Path::new(&argument)),
        };
        is_secret = argument == "--mlflow";
        words.push(shown);
    }
    words.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_can_be_typed_again_and_tells_no_password() {
        let of = |typed: &[&str]| command(typed.iter().map(|word| word.to_string()));
        assert_eq!(of(&["run", "my job.yaml"]), "moejob run 'my job.yaml'");
        let logged = ["run", "a.yaml", "--mlflow", "http://me:secret@host", "--fresh"];
        assert_eq!(of(&logged), "moejob run a.yaml --mlflow ... --fresh");
        assert_eq!(of(&["run", "--mlflow=http://me:secret@host"]), "moejob run --mlflow=...");
    }
}
