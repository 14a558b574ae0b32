//! The Machine API: HTTP/1.1 and JSON, errors as problem documents (RFC 9457). A named rule beside each endpoint says
//! who may use it.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use axum::extract::{DefaultBodyLimit, Extension, Request, State as AppState};
use axum::http::{StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use jiff::Timestamp;
use nix::unistd::{AccessFlags, Uid, access};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use tokio::net::UnixStream;
use tokio::sync::watch;

use super::identity::{self, State};
use super::services::{self, Services};
use super::upgrades::{self, Upgrades};
use crate::host::Host;
use crate::install::admission::{self, AdmissionError, Busy, MutationAdmission, Observed};
use crate::install::installed::Inventory;
use crate::storage::Backend;

/// The largest request body, in bytes.
const MOST_BODY: usize = 64 * 1024;
/// For a whole request body.
const BODY: Duration = Duration::from_secs(2);

/// Who asks over the socket, as the kernel says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Peer {
    /// Root.
    Root,
    /// The daemon's own account.
    Own,
    /// Someone in group `ployz`: the socket's mode lets nobody else in.
    Other,
}

impl Peer {
    /// The peer of a connection. In a user namespace other uids read as 65534, so only these three can be told apart.
    pub(crate) fn of(stream: &UnixStream) -> Self {
        match stream.peer_cred().map(|credentials| credentials.uid()) {
            Ok(0) => Self::Root,
            Ok(uid) if uid == Uid::current().as_raw() => Self::Own,
            _ => Self::Other,
        }
    }
}

/// Who may use an endpoint.
#[derive(Debug, Clone, Copy)]
enum Rule {
    /// Everyone whom the socket lets in.
    Everyone,
    /// Root alone.
    Root,
}

impl Rule {
    fn allows(self, peer: Peer) -> bool {
        match self {
            Self::Everyone => true,
            Self::Root => peer == Peer::Root,
        }
    }
}

/// The daemon's view of its Machine.
#[derive(Debug)]
pub(crate) struct Machine {
    host: Host,
    version: &'static str,
    started_at: Timestamp,
    digest: OnceLock<String>,
    identity: Mutex<State>,
    /// What is being changed, and since when.
    mutation: Mutex<Option<(String, Timestamp)>>,
    pub(super) upgrades: Upgrades,
    pub(super) services: Services,
    /// Whether the daemon is asked to end.
    ending: watch::Sender<bool>,
}

impl Machine {
    pub(crate) fn new(host: Host, version: &'static str) -> Self {
        identity::sweep(&host);
        let identity = Mutex::new(identity::read(&host));
        let started_at = Timestamp::now();
        Self {
            host,
            version,
            started_at,
            digest: OnceLock::new(),
            identity,
            mutation: Mutex::new(None),
            upgrades: Upgrades::new(),
            services: Services::new(),
            ending: watch::Sender::new(false),
        }
    }

    pub(super) fn host(&self) -> &Host {
        &self.host
    }

    pub(super) fn version(&self) -> &'static str {
        self.version
    }

    /// Tells when the daemon is asked to end.
    pub(crate) fn ending(&self) -> watch::Receiver<bool> {
        self.ending.subscribe()
    }

    /// Says to every request that is not complete that the daemon ends.
    pub(crate) fn end(&self) {
        self.ending.send_replace(true);
    }

    pub(crate) fn set_digest(&self, digest: String) {
        let _ = self.digest.set(digest);
    }

    fn identity(&self) -> MutexGuard<'_, State> {
        self.identity.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a reset is unfinished.
    pub(crate) fn resetting(&self) -> bool {
        matches!(*self.identity(), State::Resetting)
    }

    /// Finishes a reset, when admission is free.
    pub(crate) fn finish_reset(self: &Arc<Self>) -> Result<(), Problem> {
        let admission = self.admit("resetting this Machine")?;
        identity::finish_reset(&self.host, &admission.held)
            .map_err(|e| Problem::failed("finishing the reset", &e))?;
        *self.identity() = State::Absent;
        Ok(())
    }

    /// What keeps this Machine from being ready.
    fn problems(&self) -> Vec<String> {
        let state = self.host.state();
        let mut problems = Vec::new();
        if let Err(e) = access(&state, AccessFlags::W_OK | AccessFlags::X_OK) {
            problems.push(format!("{} can't be used: {}", state.display(), e.desc()));
        }
        if let State::Damaged(why) = &*self.identity() {
            problems.push(format!("the identity is damaged: {why}"));
        }
        problems
    }

    /// Admission for a mutation, or a busy answer that says who has it.
    pub(super) fn admit(self: &Arc<Self>, what: &str) -> Result<Mutating, Problem> {
        let held = MutationAdmission::try_take(&self.host).map_err(|e| match e {
            AdmissionError::Busy(Busy { observed: Observed::Installing { holder }, .. }) => {
                self.installing(holder.as_ref())
            }
            AdmissionError::Busy(busy) => {
                Problem::new(StatusCode::CONFLICT, "busy", format!("busy: {}", busy.what()))
            }
            e => Problem::new(StatusCode::SERVICE_UNAVAILABLE, "no-admission", e.to_string()),
        })?;
        let mut mutation = self.mutation.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(other) = &*mutation {
            return Err(changing(Some(other)));
        }
        *mutation = Some((what.to_owned(), Timestamp::now()));
        drop(mutation);
        Ok(Mutating { held, machine: Arc::clone(self) })
    }

    /// Says which mutation is under way.
    pub(super) fn mutating(&self) -> Problem {
        let mutation = self.mutation.lock().unwrap_or_else(PoisonError::into_inner).clone();
        changing(mutation.or_else(|| self.services.left_by_another()).as_ref())
    }

    fn admission(&self) -> Value {
        let mutation = self.mutation.lock().unwrap_or_else(PoisonError::into_inner);
        match (&*mutation, admission::observe(&self.host)) {
            (Some((what, since)), _) => json!({"state": "mutating", "what": what, "since": since}),
            (None, Observed::Mutating { .. }) => match self.services.left_by_another() {
                Some((what, since)) => json!({"state": "mutating", "what": what, "since": since}),
                None => json!({"state": "mutating"}),
            },
            (None, observed) => serde_json::to_value(observed).unwrap_or_default(),
        }
    }

    fn show(&self) -> Value {
        let identity = self.identity().clone();
        let (phase, id, name) = match &identity {
            State::Absent => ("uninitialized", None, None),
            State::Present(identity) => ("initialized", Some(&identity.id), Some(&identity.name)),
            State::Resetting => ("resetting", None, None),
            State::Damaged(_) => ("damaged", None, None),
        };
        let public_key = match &identity {
            State::Present(identity) => Some(&identity.public_key),
            _ => None,
        };
        let problems = self.problems();
        let (inventory, _) = Inventory::read(&self.host);
        json!({
            "id": id, "name": name, "public_key": public_key, "phase": phase,
            "version": self.version, "executable_sha256": self.digest.get(),
            "pid": std::process::id(), "started_at": self.started_at,
            "ready": problems.is_empty(), "problems": problems,
            "admission": self.admission(), "previous": inventory.previous,
            "cloud": {"paired": false, "connected": false, "since": null, "last_error": null},
            "docker": self.services.docker(), "storage": storage(&self.host),
        })
    }
}

/// Where volumes are kept here.
fn storage(host: &Host) -> Value {
    match crate::storage::read(host) {
        Ok(Backend::Directory) => json!({"state": "directory"}),
        Ok(Backend::Zfs(pool)) => json!({"state": "zfs", "pool": pool.pool, "dataset": pool.dataset}),
        Err(why) => json!({"state": "unknown", "why": why}),
    }
}

/// A mutation under way: admission, and the name under which others see it. Both end with this value.
pub(super) struct Mutating {
    held: MutationAdmission,
    machine: Arc<Machine>,
}

impl Drop for Mutating {
    fn drop(&mut self) {
        *self.machine.mutation.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

fn changing(mutation: Option<&(String, Timestamp)>) -> Problem {
    let busy = |what: String| Problem::new(StatusCode::CONFLICT, "busy", format!("busy: {what}"));
    match mutation {
        Some((what, since)) => busy(format!("{what} since {}", since.strftime("%H:%M:%S UTC")))
            .with("what", json!(what))
            .with("since", json!(since)),
        None => busy("the Machine is being changed".into()),
    }
}

/// A refusal or failure (RFC 9457).
#[derive(Debug, Serialize)]
pub(crate) struct Problem {
    #[serde(rename = "type")]
    kind: String,
    title: &'static str,
    status: u16,
    detail: String,
    /// What to do, a line each.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    help: Vec<String>,
    #[serde(flatten)]
    more: Map<String, Value>,
}

impl Problem {
    pub(super) fn new(status: StatusCode, kind: &str, detail: impl Into<String>) -> Self {
        let title = status.canonical_reason().unwrap_or("error");
        Self {
            kind: format!("urn:ployz:problem:{kind}"),
            title,
            status: status.as_u16(),
            detail: detail.into(),
            help: Vec::new(),
            more: Map::new(),
        }
    }

    /// With a member of its own.
    pub(super) fn with(mut self, member: &str, value: Value) -> Self {
        self.more.insert(member.to_owned(), value);
        self
    }

    /// With what to do.
    pub(super) fn help(mut self, help: Vec<String>) -> Self {
        self.help = help;
        self
    }

    pub(super) fn failed(doing: &str, error: &dyn std::error::Error) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "failed", format!("{doing}: {error}"))
    }
}

impl std::fmt::Display for Problem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.detail)
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let body = serde_json::to_string(&self).unwrap_or_default();
        (status, [(header::CONTENT_TYPE, "application/problem+json")], body).into_response()
    }
}

/// Every endpoint, with who may use it.
pub(crate) fn router(machine: Arc<Machine>) -> Router {
    let everyone = Router::new()
        .route("/v1/machine", get(show))
        .route("/v1/machine/initialize", post(initialize))
        .route("/v1/services", get(services::list).post(services::deploy))
        .route("/v1/services/{name}", axum::routing::delete(services::remove))
        .route("/v1/upgrades", get(upgrades::history).post(upgrades::ask))
        .route("/v1/upgrades/{id}", get(upgrades::show))
        .layer(middleware::from_fn(|peer, request, next| permit(Rule::Everyone, peer, request, next)));
    let root = Router::new()
        .route("/v1/machine/reset", post(reset))
        .layer(middleware::from_fn(|peer, request, next| permit(Rule::Root, peer, request, next)));
    everyone
        .merge(root)
        .fallback(|| async {
            Problem::new(StatusCode::NOT_FOUND, "no-such-endpoint", "there is no such endpoint")
        })
        .method_not_allowed_fallback(|| async {
            Problem::new(StatusCode::METHOD_NOT_ALLOWED, "method", "this endpoint has other methods")
        })
        .layer(DefaultBodyLimit::max(MOST_BODY))
        .layer(middleware::from_fn_with_state(Arc::clone(&machine), whole_request))
        .with_state(machine)
}

/// Reads a request's body whole before anything else is done with it: bounded in size and time, and given up at once
/// when the daemon is asked to end, so that one half-sent request delays nobody.
async fn whole_request(AppState(machine): AppState<Arc<Machine>>, request: Request, next: Next) -> Response {
    let (head, body) = request.into_parts();
    let mut ending = machine.ending();
    let read = tokio::select! {
        biased;
        read = tokio::time::timeout(BODY, axum::body::to_bytes(body, MOST_BODY)) => read,
        _ = ending.wait_for(|ending| *ending) => {
            return Problem::new(StatusCode::SERVICE_UNAVAILABLE, "ending", "the daemon is ending").into_response();
        }
    };
    match read {
        Ok(Ok(body)) => next.run(Request::from_parts(head, body.into())).await,
        Ok(Err(e)) => Problem::new(StatusCode::PAYLOAD_TOO_LARGE, "body", e.to_string()).into_response(),
        Err(_) => {
            Problem::new(StatusCode::REQUEST_TIMEOUT, "timeout", "the request was not complete in time")
                .into_response()
        }
    }
}

async fn permit(rule: Rule, Extension(peer): Extension<Peer>, request: Request, next: Next) -> Response {
    if rule.allows(peer) {
        return next.run(request).await;
    }
    Problem::new(StatusCode::FORBIDDEN, "not-permitted", "only root may do this: use sudo").into_response()
}

async fn show(AppState(machine): AppState<Arc<Machine>>) -> Json<Value> {
    services::look_again(&machine);
    Json(machine.show())
}

/// A mutation with a field that this release does not know is refused: dropping it silently would do something else
/// than was asked.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Initialize {
    name: Option<String>,
}

fn read<T: Default + serde::de::DeserializeOwned>(body: &[u8]) -> Result<T, Problem> {
    if body.is_empty() {
        return Ok(T::default());
    }
    let refused =
        |e: serde_json::Error| Problem::new(StatusCode::UNPROCESSABLE_ENTITY, "body", e.to_string());
    serde_json::from_slice(body).map_err(refused)
}

async fn initialize(
    AppState(machine): AppState<Arc<Machine>>,
    body: axum::body::Bytes,
) -> Result<(StatusCode, Json<Value>), Problem> {
    let asked: Initialize = read(&body)?;
    let name = asked.name.unwrap_or_else(|| machine.host.name());
    if !identity::is_name(&name) {
        let detail = format!("{name:?} is not a name: 1 to 63 letters, digits, dots and dashes");
        return Err(Problem::new(StatusCode::UNPROCESSABLE_ENTITY, "name", detail));
    }
    let admission = machine.admit("initializing this Machine")?;
    // The file decides, not what was read at the start.
    let found = identity::read(&machine.host);
    let refusal = match &found {
        State::Absent => None,
        State::Present(identity) => Some(format!("this Machine is {} already", identity.name)),
        State::Resetting => Some("this Machine is being reset".to_owned()),
        State::Damaged(why) => Some(format!("the identity is damaged ({why}): reset it first, as root")),
    };
    if let Some(detail) = refusal {
        return Err(Problem::new(StatusCode::CONFLICT, "initialized", detail));
    }
    let made = identity::initialize(&machine.host, &name, &admission.held)
        .map_err(|e| Problem::failed("writing the identity", &e))?;
    tracing::info!("initialized as {} ({})", made.name, made.id);
    *machine.identity() = State::Present(Box::new(made));
    drop(admission);
    Ok((StatusCode::CREATED, Json(machine.show())))
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Reset {}

async fn reset(
    AppState(machine): AppState<Arc<Machine>>,
    body: axum::body::Bytes,
) -> Result<Json<Value>, Problem> {
    let Reset {} = read(&body)?;
    let admission = machine.admit("resetting this Machine")?;
    // In a task of its own: it goes on when this request's client is gone.
    let resetting = tokio::spawn(reset_under(Arc::clone(&machine), admission));
    resetting.await.unwrap_or_else(|e| Err(Problem::failed("resetting", &e)))?;
    Ok(Json(machine.show()))
}

async fn reset_under(machine: Arc<Machine>, admission: Mutating) -> Result<(), Problem> {
    // First, so that what can't be removed is said while nothing is changed.
    services::remove_all(&machine).await?;
    let found = identity::read(&machine.host);
    identity::begin_reset(&machine.host, &found, &admission.held)
        .map_err(|e| Problem::failed("beginning the reset", &e))?;
    *machine.identity() = State::Resetting;
    identity::finish_reset(&machine.host, &admission.held)
        .map_err(|e| Problem::failed("finishing the reset", &e))?;
    *machine.identity() = State::Absent;
    tracing::info!("reset");
    Ok(())
}
