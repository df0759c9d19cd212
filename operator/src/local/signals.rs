//! Signals that end a run.

use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;

/// Whether each is a terminal's that hangs up, which ends a run as Ctrl-C does: with a checkpoint.
pub fn watch() -> std::io::Result<mpsc::Receiver<bool>> {
    let (sender, receiver) = mpsc::channel(1);
    for kind in [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()] {
        let (mut signals, sender) = (signal(kind)?, sender.clone());
        tokio::spawn(async move {
            while signals.recv().await.is_some() {
                let _ = sender.send(kind == SignalKind::hangup()).await;
            }
        });
    }
    Ok(receiver)
}
