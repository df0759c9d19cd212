//! `moejob operator`: runs MoeJobs on the cluster whose API server it is told of.

use super::complain;
use moe_worker::failure::chain;
use crate::apply::{ApplyError, Writer};
use crate::controller::{Clock, Context, Controller, EVENTS_MAX, Inputs, Order};
use crate::lease::{Deadline, Election};
use crate::metrics::Metrics;
use crate::observe;
use crate::pulse::{Pulse, abort_on_panic};
use crate::scrape::Scrape;
use clap::Args;
use kube::{Client, Config};
use moejob_identity::{IdentityError, Keyring, Reviewer};
use moejob_manifest::crd;
use moejob_plan::lead::Operator;
use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, oneshot};

/// Between two tries of something at the start.
const START_PAUSE: Duration = Duration::from_secs(2);
/// How often the authority's Secret is looked at (whether it is whole, and how old), and the
/// definition of MoeJobs while this process leads.
const LOOK_EVERY: Duration = Duration::from_secs(15);

#[derive(Args)]
pub struct OperatorArgs {
    /// The operator's own namespace: of its Lease and of its Secret.
    #[arg(long, env = "POD_NAMESPACE", default_value = "moejob-system")]
    pub namespace: String,
    /// The operator's own pod, whose image workers run unless their job names one.
    #[arg(long, env = "POD_NAME")]
    pub pod: Option<String>,
    /// The workers' image, in place of the operator's own.
    #[arg(long)]
    pub image: Option<String>,
    /// The Lease of leadership.
    #[arg(long, default_value = "moejob-operator")]
    pub lease: String,
    /// The Secret of the certificate authority; it must exist, and may be empty.
    #[arg(long, default_value = "moejob-authority")]
    pub secret: String,
    /// Where /healthz and /readyz are answered.
    #[arg(long, default_value = "0.0.0.0:8080")]
    pub listen: SocketAddr,
    /// Where /metrics is answered, with TLS, to who may read it.
    #[arg(long, default_value = "0.0.0.0:8443")]
    pub metrics: SocketAddr,
    /// How often all jobs, pods and nodes are listed anew, in seconds: it finds what a watch has
    /// lost.
    #[arg(long, default_value = "600", value_parser = clap::value_parser!(u32).range(1..))]
    pub list_every: u32,
    /// Pods of all jobs together, at most, that show autoscalers which nodes are missing; 0 makes
    /// none.
    #[arg(long, default_value = "64", value_parser = clap::value_parser!(u32).range(..=4096))]
    pub placeholders: u32,
    /// For tests on clusters without GPUs: engines of GPU jobs compute on processors, in pods that
    /// ask for the GPUs all the same (docs/testing.md).
    #[arg(long, env = "MOEJOB_STAND_IN", hide = true)]
    pub stand_in: bool,
}

#[derive(Debug, thiserror::Error)]
enum OperatorError {
    #[error("cannot start the asynchronous runtime")]
    Runtime(#[source] std::io::Error),
    #[error("no cluster is configured: neither a kubeconfig nor a service account was found")]
    Config(#[source] kube::config::InferConfigError),
    #[error("cannot make a client of the API server")]
    Client(#[source] kube::Error),
    #[error("cannot answer at {at}")]
    Listen { at: SocketAddr, source: std::io::Error },
    #[error("the Secret {name} in namespace {namespace}")]
    Secret { namespace: String, name: String, source: IdentityError },
    #[error("the workers' image is not known: give --image, or run in a pod with POD_NAME set")]
    Image,
    #[error("this operator must not lead: {0}")]
    Unfit(String),
    #[error("a watch has ended; the process begins anew")]
    Watch,
    #[error("leadership was lost; another operator leads, or the API server cannot be reached")]
    Lost,
}

pub fn run(args: &OperatorArgs) -> ExitCode {
    abort_on_panic();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let result = runtime.map_err(OperatorError::Runtime).and_then(|runtime| {
        let result = runtime.block_on(operate(args));
        // Requests that are under way are not waited for.
        runtime.shutdown_background();
        result
    });
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            complain(&error);
            ExitCode::FAILURE
        }
    }
}

async fn operate(args: &OperatorArgs) -> Result<(), OperatorError> {
    let config = Config::infer().await.map_err(OperatorError::Config)?;
    let client = Client::try_from(config.clone()).map_err(OperatorError::Client)?;
    let metrics = Metrics::default();
    let serve = metrics.clone().serve(args.listen);
    let mut serving = tokio::spawn(serve);
    let listen = |source| OperatorError::Listen { at: args.metrics, source };
    let names = vec![format!("moejob-operator.{}.svc", args.namespace)];
    let scrape = Scrape::new(metrics.clone(), client.clone(), names).map_err(listen)?;
    let mut scraped = tokio::spawn(scrape.serve(args.metrics));
    let identity = identity(args);
    let deadline = Deadline::default();
    let writer = Writer::new(client.clone(), identity.clone(), deadline.clone());
    let keyring = Arc::new(keyring(&client, &writer, args).await?);
    let operator = Operator {
        image: own_image(&client, args).await?,
        namespace: args.namespace.clone(),
        trusted: keyring.trusted(),
        keyring: keyring.id(),
        stand_in: args.stand_in,
        profiles: Arc::default(),
        placeholders_max: args.placeholders,
    };
    let secret = |source| OperatorError::Secret {
        namespace: args.namespace.clone(),
        name: args.secret.clone(),
        source,
    };
    let (change_sender, changes) = mpsc::channel(EVENTS_MAX);
    let (told_sender, told) = mpsc::channel(EVENTS_MAX);
    let (order_sender, orders) = mpsc::channel(8);
    let (unfit_sender, mut unfit) = mpsc::channel(1);
    let lists = Duration::from_secs(args.list_every.into());
    let lists = (lists, &metrics);
    let mut watches = observe::follow(&client, &keyring, &args.namespace, lists, &change_sender);
    let pulse = Pulse::default();
    metrics.watch(pulse.clone());
    pulse.guard().map_err(OperatorError::Runtime)?;
    let context = Context {
        authority: keyring.authority().map_err(secret)?,
        keyring: Arc::clone(&keyring),
        reviewer: Reviewer::new(client.clone()),
        writer: writer.clone(),
        metrics: metrics.clone(),
        told: told_sender,
        clock: Clock::start(),
        pulse,
    };
    let inputs = Inputs { changes, told, orders, unfit: unfit_sender };
    tokio::spawn(Controller::new(context, operator, inputs).run());
    let (namespace, name) = (args.namespace.clone(), args.lease.clone());
    let election = Election { client: client.clone(), writer, namespace, name, identity, deadline };
    let leadership = async {
        until_defined(&client, &metrics).await;
        let lost = lead(config, &election, order_sender)?;
        tokio::select! {
            // A thread that has ended by itself leads no more either.
            _ = lost => Err(OperatorError::Lost),
            () = watch_definition(&client, &metrics) => Err(OperatorError::Lost),
        }
    };
    let listening = |at, result: std::io::Result<()>| match result {
        Ok(()) => OperatorError::Lost,
        Err(source) => OperatorError::Listen { at, source },
    };
    let terminated = async {
        let mut signals = signal(SignalKind::terminate()).ok()?;
        signals.recv().await
    };
    tokio::select! {
        result = leadership => result,
        result = &mut serving => Err(listening(args.listen, result.unwrap_or(Ok(())))),
        result = &mut scraped => Err(listening(args.metrics, result.unwrap_or(Ok(())))),
        () = renew(&client, &election.writer, args, &keyring) => {
            election.release().await;
            Ok(())
        }
        _ = watches.join_next() => {
            election.release().await;
            Err(OperatorError::Watch)
        }
        why = unfit.recv() => {
            election.release().await;
            Err(OperatorError::Unfit(why.unwrap_or_default()))
        }
        _ = terminated => {
            election.release().await;
            Ok(())
        }
        _ = tokio::signal::ctrl_c() => {
            election.release().await;
            Ok(())
        }
    }
}

/// Takes the lease and renews it in a thread of its own: whatever the loop decides meanwhile, and
/// however slowly, nobody else begins to lead beside it. What it gives ends with the leadership.
fn lead(
    config: Config,
    election: &Election,
    orders: mpsc::Sender<Order>,
) -> Result<oneshot::Receiver<()>, OperatorError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(OperatorError::Runtime)?;
    let (ended, lost) = oneshot::channel();
    let (namespace, name) = (election.namespace.clone(), election.name.clone());
    let (identity, deadline) = (election.identity.clone(), election.deadline.clone());
    let hold = move || {
        let hold = async {
            // Connections of another runtime are served by its thread.
            let client = Client::try_from(config)?;
            let writer = Writer::new(client.clone(), identity.clone(), deadline.clone());
            let election = Election { client, writer, namespace, name, identity, deadline };
            let term = election.acquire().await;
            let _ = orders.send(Order::Lead(term)).await;
            // A full channel has told it already.
            election.hold(|| drop(orders.try_send(Order::Heard))).await;
            Ok::<(), kube::Error>(())
        };
        if let Err(error) = runtime.block_on(hold) {
            tracing::error!(error = chain(&error), "the lease cannot be held");
        }
        // Without a receiver the process ends.
        let _ = ended.send(());
    };
    let thread = std::thread::Builder::new().name("lease".to_string()).spawn(hold);
    thread.map(|_| lost).map_err(OperatorError::Runtime)
}

/// Tells once, and makes this process unready, where the definition is replaced by an older one
/// under it: each status that it writes is refused or cut from then on. It leads on, as nobody else
/// could do better, and what it holds is written once the definition is back.
async fn watch_definition(client: &Client, metrics: &Metrics) {
    let mut told = None;
    loop {
        tokio::time::sleep(LOOK_EVERY).await;
        // An API server that does not answer says nothing of its definition.
        let Ok(served) = observe::definition(client).await else { continue };
        let why = served.map_or_else(
            || Some(format!("there is no definition {} any more", crd::NAME)),
            |served| misfit(&served).map(|why| format!("{why}; until then no status is written")),
        );
        if why != told {
            metrics.set_unfit(why.clone());
            match &why {
                Some(why) => tracing::error!("{why}"),
                None => tracing::info!("the definition {} is whole again", crd::NAME),
            }
            told = why;
        }
    }
}

/// Waits until the definition of MoeJobs keeps all that the operator writes. What of a record is
/// pruned no later leader would know.
async fn until_defined(client: &Client, metrics: &Metrics) {
    let mut told = None;
    loop {
        let why = match observe::definition(client).await {
            Ok(Some(served)) => judge_definition(&served),
            Ok(None) => Some(format!("there is no definition {}", crd::NAME)),
            Err(kube::Error::Api(status)) if status.code == 403 => {
                tracing::warn!("the definition {} cannot be compared: {status}", crd::NAME);
                None
            }
            Err(error) => Some(format!("the definition {} cannot be read: {error}", crd::NAME)),
        };
        metrics.set_unfit(why.clone());
        let Some(why) = why else { return };
        if told.as_ref() != Some(&why) {
            tracing::error!("this operator does not lead: {why}");
            told = Some(why);
        }
        tokio::time::sleep(START_PAUSE).await;
    }
}

const ADVICE: &str = "kubectl apply -f manifests/crd.yaml (Helm does not upgrade it)";

/// Why no operator of this version may lead by this definition. Fields of the spec that it does not
/// know nobody can set: that is told, and no hindrance.
fn judge_definition(served: &serde_json::Value) -> Option<String> {
    let others = crd::pruned_by(served).into_iter().filter(|path| path.starts_with("spec."));
    let others = others.collect::<Vec<_>>().join(", ");
    if !others.is_empty() {
        tracing::warn!("the definition {} does not know {others}: {ADVICE}", crd::NAME);
    }
    misfit(served)
}

/// Fields that the operator writes and that this definition would prune.
fn misfit(served: &serde_json::Value) -> Option<String> {
    let own = crd::pruned_by(served).into_iter().filter(|path| !path.starts_with("spec."));
    let own = own.collect::<Vec<_>>().join(", ");
    (!own.is_empty()).then(|| {
        format!("the definition {} would prune {own}: {ADVICE}", crd::NAME)
    })
}

/// Unlike that of any other process, also of the one before in the same pod.
fn identity(args: &OperatorArgs) -> String {
    let pod = args.pod.as_deref().unwrap_or("operator");
    let since = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
    format!("{pod}_{:x}-{:x}", since.as_nanos(), std::process::id())
}

/// Reads the authority, or makes it when the Secret is empty. Waits for the Secret and for the API
/// server.
async fn keyring(
    client: &Client,
    writer: &Writer,
    args: &OperatorArgs,
) -> Result<Keyring, OperatorError> {
    loop {
        match refreshed(client, writer, args).await? {
            Some((keyring, _)) => return Ok(keyring),
            None => tokio::time::sleep(START_PAUSE).await,
        }
    }
}

/// The keyring as it is to be used now, and whether it was just written. None: try again.
async fn refreshed(
    client: &Client,
    writer: &Writer,
    args: &OperatorArgs,
) -> Result<Option<(Keyring, bool)>, OperatorError> {
    let failed = |source| OperatorError::Secret {
        namespace: args.namespace.clone(),
        name: args.secret.clone(),
        source,
    };
    let secret = match observe::secret(client, &args.namespace, &args.secret).await {
        Ok(Some(secret)) => secret,
        Ok(None) => {
            let (name, namespace) = (&args.secret, &args.namespace);
            tracing::warn!(name, namespace, "the Secret is not there (kubectl apply -k manifests)");
            return Ok(None);
        }
        Err(error) => {
            tracing::warn!(%error, "the Secret cannot be read");
            return Ok(None);
        }
    };
    let data = secret.data.clone().unwrap_or_default();
    let now = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default().as_secs() as i64;
    let next = match Keyring::read(&data).map_err(failed)? {
        None => Keyring::new().map_err(failed)?,
        Some(keyring) => match keyring.due(now).map_err(failed)? {
            None => return Ok(Some((keyring, false))),
            Some(next) => next,
        },
    };
    let mut secret = secret;
    secret.data = Some(next.write());
    match writer.replace_secret(&secret).await {
        Ok(()) => Ok(Some((next, true))),
        Err(ApplyError::Conflict) => Ok(None),
        Err(error) => {
            complain(&error);
            Ok(None)
        }
    }
}

/// Returns when there is a new authority or successor: the process begins anew with it, and takes
/// over all that runs. A Secret that was emptied meanwhile gets back what this process holds: with
/// another authority nobody could lead the gangs that train.
async fn renew(client: &Client, writer: &Writer, args: &OperatorArgs, keyring: &Keyring) {
    let mut told = None;
    loop {
        tokio::time::sleep(LOOK_EVERY).await;
        let lost = match heal(client, writer, args, keyring).await {
            Ok(lost) => lost,
            Err(error) => Some(chain(&error)),
        };
        // A Secret that stays away is told once.
        if lost != told {
            let (namespace, name) = (&args.namespace, &args.secret);
            lost.iter().for_each(|why| tracing::error!("Secret {namespace}/{name}: {why}"));
            told = lost;
        }
        if told.is_some() {
            continue;
        }
        match refreshed(client, writer, args).await {
            Ok(Some((found, _))) if found == *keyring => {}
            Ok(Some(_)) => {
                tracing::info!("the authority was renewed; beginning anew with it");
                return;
            }
            Ok(None) => {}
            Err(error) => complain(&error),
        }
    }
}

/// What is amiss with the Secret, if anything.
async fn heal(
    client: &Client,
    writer: &Writer,
    args: &OperatorArgs,
    keyring: &Keyring,
) -> Result<Option<String>, ApplyError> {
    let Some(mut secret) = observe::secret(client, &args.namespace, &args.secret).await? else {
        return Ok(Some(format!(
            "it is gone, and with it the next leader's right to lead what trains: make it anew, \
             empty (kubectl create secret generic {} -n {}), and this operator fills it",
            args.secret, args.namespace
        )));
    };
    if secret.data.as_ref().is_some_and(|data| !data.is_empty()) {
        return Ok(None);
    }
    secret.data = Some(keyring.write());
    writer.replace_secret(&secret).await?;
    let (namespace, name) = (&args.namespace, &args.secret);
    tracing::warn!("Secret {namespace}/{name} was emptied: what this operator holds is in it");
    Ok(None)
}

async fn own_image(
    client: &Client,
    args: &OperatorArgs,
) -> Result<(String, Option<String>), OperatorError> {
    if let Some(image) = &args.image {
        return Ok((image.clone(), None));
    }
    let pod = args.pod.as_deref().ok_or(OperatorError::Image)?;
    loop {
        match observe::own_image(client, &args.namespace, pod).await {
            Ok(Some(found)) => return Ok(found),
            Ok(None) => return Err(OperatorError::Image),
            Err(error) => tracing::warn!(%error, "the operator's own pod cannot be read"),
        }
        tokio::time::sleep(START_PAUSE).await;
    }
}
