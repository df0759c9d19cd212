//! Waiting for a job, with a line for each phase that it comes to.

use super::cluster::{Cluster, JOBS};
use super::error::MoeError;
use super::follow::Followed;
use super::job::JobView;
use super::{now, run_until_interrupted};
use std::time::Duration;

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Goal {
    /// It trains.
    Running,
    /// All steps are done.
    Complete,
    #[value(skip)]
    Held,
    #[value(skip)]
    Gone,
}

/// What a look at a job means for whoever waits.
#[derive(Debug, PartialEq, Eq)]
enum Reached {
    Yes,
    NotYet,
    /// It will not happen.
    Never(String),
}

/// # Errors
/// When the goal cannot be reached any more, or not in time.
pub async fn wait(
    cluster: &Cluster,
    name: &str,
    goal: Goal,
    timeout: Duration,
) -> Result<(), MoeError> {
    let limited = tokio::time::timeout(timeout, follow(cluster, name, goal));
    let waited = async {
        limited.await.unwrap_or_else(|_| {
            let seconds = timeout.as_secs();
            let text = format!(
                "{name} is not {goal:?} after {seconds} s, and goes on; `kubectl moe show {name}` \
                 says why"
            );
            Err(MoeError::TooLate(text))
        })
    };
    run_until_interrupted(waited).await
}

async fn follow(cluster: &Cluster, name: &str, goal: Goal) -> Result<(), MoeError> {
    let field = format!("metadata.name={name}");
    let stream = cluster.watch(JOBS, Some(&cluster.namespace), None, Some(&field));
    let mut followed = Followed::new(stream);
    let mut said = String::new();
    while let Some(objects) = followed.next().await {
        let gone = objects.iter().any(|object| object["gone"] == true) || objects.is_empty();
        let job = objects.last().map(JobView::read);
        if let Some(job) = &job {
            let line = match job.reason() {
                reason if reason.is_empty() => job.phase_in_words(now()),
                reason => format!("{}: {reason}", job.phase()),
            };
            let line = line.lines().next().unwrap_or_default().to_string();
            let phase = format!("{} {}", job.phase(), job.reason());
            // The operator has a moment to look at it.
            if phase != said && job.phase() != "Submitted" {
                eprintln!("{name}: {}", super::output::plain(&line));
                said = phase;
            }
        }
        match reached(job.as_ref(), gone, goal) {
            Reached::Yes => return Ok(()),
            Reached::Never(why) => return Err(MoeError::Failed(why)),
            Reached::NotYet => {}
        }
    }
    Err(MoeError::TooLate(format!("the watch of {name} has ended; try again")))
}

fn reached(job: Option<&JobView>, gone: bool, goal: Goal) -> Reached {
    let Some(job) = job.filter(|_| !gone) else {
        return match goal {
            Goal::Gone => Reached::Yes,
            _ => Reached::Never("the job is gone".to_string()),
        };
    };
    let name = &job.name;
    let phase = job.status.phase.as_str();
    // What stands in the status may be about the spec before.
    if job.is_unseen() && !job.deleted {
        return Reached::NotYet;
    }
    match (goal, phase) {
        (Goal::Held, "Suspended") | (Goal::Complete, "Complete") => Reached::Yes,
        (Goal::Held, "Pending") if job.held => Reached::Yes,
        (Goal::Running, "Running" | "Complete") => Reached::Yes,
        (Goal::Gone, _) => Reached::NotYet,
        (_, "Failed" | "Invalid") => Reached::Never(format!("{name} is {phase}: {}", job.reason())),
        (Goal::Held, "Complete") => Reached::Never(format!("{name} is complete already")),
        (Goal::Running | Goal::Complete, _) if job.held => {
            Reached::Never(format!("{name} is held; `kubectl moe release {name}` lets it go on"))
        }
        _ => Reached::NotYet,
    }
}

#[cfg(test)]
mod tests {
    use super::super::job::tests::object;
    use super::*;
    use serde_json::json;

    #[test]
    fn a_goal_is_reached_or_out_of_reach() {
        let look = |phase: &str, held: bool, seen: i64, goal: Goal| {
            let mut object = object("a", json!({"phase": phase, "observedGeneration": seen}));
            object["spec"]["suspend"] = json!(held);
            reached(Some(&JobView::read(&object)), false, goal)
        };
        assert_eq!(look("Running", false, 1, Goal::Running), Reached::Yes);
        assert_eq!(look("Running", false, 0, Goal::Running), Reached::NotYet);
        assert_eq!(look("Complete", false, 1, Goal::Running), Reached::Yes);
        assert_eq!(look("Running", false, 1, Goal::Complete), Reached::NotYet);
        assert_eq!(look("Suspended", true, 1, Goal::Held), Reached::Yes);
        assert_eq!(look("Stopping", true, 1, Goal::Held), Reached::NotYet);
        for (phase, held, goal) in [
            ("Failed", false, Goal::Running),
            ("Invalid", false, Goal::Complete),
            ("Suspended", true, Goal::Complete),
            ("Complete", true, Goal::Held),
        ] {
            let found = look(phase, held, 1, goal);
            assert!(matches!(found, Reached::Never(_)), "{phase} {goal:?}: {found:?}");
        }
        assert_eq!(reached(None, true, Goal::Gone), Reached::Yes);
        assert!(matches!(reached(None, true, Goal::Complete), Reached::Never(_)));
    }
}
