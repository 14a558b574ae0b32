//! Upgrades over the Machine API: asked for at the door, and looked at in the records. The daemon changes nothing by
//! itself: it resolves what is wanted, keeps one request at the door at a time, and answers all others.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::Json;
use axum::extract::{Path, Query, State as AppState};
use axum::http::StatusCode;
use jiff::Timestamp;
use nix::sys::stat::stat;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::{Semaphore, watch};
use tokio::time::Instant;

use super::api::{Machine, Problem};
use crate::durable::{sha256, sha256_file};
use crate::install::Unresolved;
use crate::install::admission::{self, Observed};
use crate::install::attempt::{State, is_id};
use crate::install::records::{self, ReadError, Seen, View};
use crate::install::upgrade::{self, Answer, Selection, Target};
use crate::interrupt::Interrupt;

/// The longest wait for a change.
const MOST_WAIT: Duration = Duration::from_secs(30);
/// How many may wait at once.
const MOST_WAITING: usize = 32;
/// Between two looks while somebody waits.
const LOOK: Duration = Duration::from_millis(50);
/// For how long the same request, asked again, waits for the first one's answer.
const SAME: Duration = Duration::from_secs(100);
/// What does an upgrade where the daemon or its door can't.
const BY_HAND: &str = "sudo /usr/local/bin/ployzd install --version";

/// What the daemon knows of upgrades by itself: nothing that could not be lost.
#[derive(Debug)]
pub(crate) struct Upgrades {
    /// The request that is at the door, or on its way to it: its id, and since when.
    asking: Mutex<Option<(String, Timestamp)>>,
    /// Changes whenever that ends.
    answered: watch::Sender<()>,
    places: Arc<Semaphore>,
    /// The digest of the file in place, and what the file looked like when it was read.
    in_place: Mutex<Option<(Stamp, String)>>,
}

type Stamp = (u64, u64, i64, i64, i64);

impl Upgrades {
    pub(crate) fn new() -> Self {
        Self {
            asking: Mutex::new(None),
            answered: watch::Sender::new(()),
            places: Arc::new(Semaphore::new(MOST_WAITING)),
            in_place: Mutex::new(None),
        }
    }

    fn asking(&self) -> MutexGuard<'_, Option<(String, Timestamp)>> {
        self.asking.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The one place at the door, or who has it.
    fn begin(&self, id: &str) -> Result<Asking<'_>, (String, Timestamp)> {
        let mut asking = self.asking();
        if let Some(other) = &*asking {
            return Err(other.clone());
        }
        *asking = Some((id.to_owned(), Timestamp::now()));
        Ok(Asking { upgrades: self })
    }
}

/// The place at the door; free again when this value is gone.
struct Asking<'a> {
    upgrades: &'a Upgrades,
}

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        *self.upgrades.asking() = None;
        self.upgrades.answered.send_replace(());
    }
}

/// What is asked for. A field that this release does not know refuses the whole.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Ask {
    attempt: String,
    release: Selection,
}

/// `POST /v1/upgrades`: 202 when its record is durable, 200 when this id has been accepted before.
pub(super) async fn ask(
    AppState(machine): AppState<Arc<Machine>>,
    body: axum::body::Bytes,
) -> Result<(StatusCode, Json<Value>), Problem> {
    let not_understood = |why: String| Problem::new(StatusCode::UNPROCESSABLE_ENTITY, "body", why);
    let asked: Ask = serde_json::from_slice(&body).map_err(|e| not_understood(e.to_string()))?;
    if !is_id(&asked.attempt) {
        return Err(not_understood("attempt is not 32 lower-case hex digits".into()));
    }
    let started = Instant::now();
    let place = loop {
        let mut answered = machine.upgrades.answered.subscribe();
        if let Some(seen) = machine.attempt(&asked.attempt).await? {
            return same_or_conflict(&asked, &seen).map(|found| (StatusCode::OK, found));
        }
        match machine.upgrades.begin(&asked.attempt) {
            Ok(place) => break place,
            Err((other, _)) if other == asked.attempt && started.elapsed() < SAME => {
                let _ = tokio::time::timeout(SAME, answered.changed()).await;
            }
            Err((other, since)) => {
                let at = since.strftime("%H:%M:%S UTC");
                let busy = Problem::new(
                    StatusCode::CONFLICT,
                    "busy",
                    format!("busy: upgrade {other} is being asked for since {at}"),
                );
                return Err(busy.with("attempt", json!(other)).with("since", json!(since)));
            }
        }
    };
    if let Some(busy) = machine.busy() {
        return Err(busy);
    }
    let target = resolve(&machine, asked.release).await?;
    let answer = upgrade::ask(machine.host(), &asked.attempt, target).await;
    drop(place);
    conclude(&machine, &asked, target, answer).await
}

/// What the door's answer, or its silence, comes to.
async fn conclude(
    machine: &Machine,
    asked: &Ask,
    target: Target,
    answer: Result<Answer, upgrade::DoorError>,
) -> Result<(StatusCode, Json<Value>), Problem> {
    let version = target.version;
    // The record decides: an answer may be lost, or be about an attempt that was this one all along.
    let seen = machine.attempt(&asked.attempt).await?;
    match (answer, seen) {
        (Ok(Answer::Accepted(_)), Some(seen)) => Ok((StatusCode::ACCEPTED, shown(&seen))),
        (Ok(Answer::Accepted(record)), None) => Ok((
            StatusCode::ACCEPTED,
            Json(json!({"record": record, "state": "unknown", "why": "its record can't be read"})),
        )),
        (Ok(Answer::Existing(_) | Answer::Conflict(_) | Answer::Busy { .. }), Some(seen)) => {
            same_or_conflict(asked, &seen).map(|found| (StatusCode::OK, found))
        }
        (Ok(Answer::Existing(record)), None) => Ok((
            StatusCode::OK,
            Json(json!({"record": record, "state": "unknown", "why": "its record can't be read"})),
        )),
        (Ok(Answer::Conflict(record)), None) => Err(conflict(&record)),
        (Ok(Answer::Busy { what, attempt }), None) => {
            let busy = Problem::new(StatusCode::CONFLICT, "busy", format!("busy: {what}"));
            Err(machine.busy().unwrap_or_else(|| busy.with("attempt", json!(attempt))))
        }
        (Ok(Answer::Rejected { reason, help }), _) => {
            Err(Problem::new(StatusCode::UNPROCESSABLE_ENTITY, "rejected", reason).help(help))
        }
        // Accepted, whatever became of the answer.
        (Err(e), Some(seen)) => {
            tracing::warn!("asking for an upgrade: {e}; its record is there");
            Ok((StatusCode::ACCEPTED, shown(&seen)))
        }
        (Err(e), None) => {
            tracing::warn!("asking for an upgrade: {e}");
            let help = vec![
                "look at it: systemctl status ployz-upgrade.socket".to_owned(),
                format!("do it by hand: {BY_HAND} {version}"),
            ];
            let detail = format!("{e}; no attempt {} is recorded", asked.attempt);
            Err(Problem::new(StatusCode::SERVICE_UNAVAILABLE, "door-unreachable", detail).help(help))
        }
    }
}

/// Resolves in a thread: the child that fetches is waited for.
async fn resolve(machine: &Machine, selection: Selection) -> Result<Target, Problem> {
    let own: crate::install::release::Version = machine.version().parse().map_err(|_| {
        let detail = format!("this daemon has no release version ({})", machine.version());
        Problem::new(StatusCode::SERVICE_UNAVAILABLE, "no-version", detail)
    })?;
    let host = machine.host().clone();
    let resolved = tokio::task::spawn_blocking(move || {
        let interrupt = Interrupt::never().map_err(|e| e.to_string())?;
        Ok(upgrade::resolve(&host, own, selection, &interrupt))
    });
    let failed = |e: String| Problem::new(StatusCode::INTERNAL_SERVER_ERROR, "failed", e);
    let resolved: Result<_, String> = resolved.await.map_err(|e| failed(e.to_string()))?;
    resolved.map_err(failed)?.map_err(|e| {
        let (status, kind, problem) = match e {
            Unresolved::NoSuchRelease(p) => (StatusCode::UNPROCESSABLE_ENTITY, "no-such-release", p),
            Unresolved::Unreachable(p) => (StatusCode::SERVICE_UNAVAILABLE, "source-unreachable", p),
            Unresolved::Refused(p) => (StatusCode::UNPROCESSABLE_ENTITY, "refused", p),
        };
        Problem::new(status, kind, problem.what).help(vec![problem.help])
    })
}

/// An id that is known already: the same request, or another one.
fn same_or_conflict(asked: &Ask, seen: &Seen) -> Result<Json<Value>, Problem> {
    let text = |field: &str| seen.record.get(field).and_then(Value::as_str);
    let requested = seen.record.get("requested").and_then(|requested| requested.get("channel"));
    let same = match asked.release {
        Selection::Exact(version) => text("target") == Some(version.to_string().as_str()),
        Selection::Channel(channel) => {
            requested.and_then(Value::as_str) == Some(channel.to_string().as_str())
        }
    };
    if same { Ok(shown(seen)) } else { Err(conflict(&seen.record)) }
}

fn conflict(record: &Value) -> Problem {
    let text = |field: &str| record.get(field).and_then(Value::as_str).unwrap_or("unknown");
    let detail = format!("attempt {} is about {} already: take another id", text("id"), text("target"));
    Problem::new(StatusCode::CONFLICT, "conflict", detail).with("record", record.clone())
}

/// An attempt, with a word that changes whenever anything of it does.
fn shown(seen: &Seen) -> Json<Value> {
    let mut value = serde_json::to_value(seen).unwrap_or_default();
    value["revision"] = revision(seen).into();
    Json(value)
}

fn revision(seen: &Seen) -> String {
    let text = serde_json::to_vec(seen).unwrap_or_default();
    sha256(text.as_slice()).map(|(digest, _)| digest[..16].to_owned()).unwrap_or_default()
}

/// For how long to wait for a change, and from what.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Wait {
    /// `30s`
    wait: Option<String>,
    /// The revision that the asker has seen: without it, the one when it asks.
    seen: Option<String>,
}

/// `GET /v1/upgrades`: the bounded history, newest first.
pub(super) async fn history(AppState(machine): AppState<Arc<Machine>>) -> Result<Json<Value>, Problem> {
    let in_place = machine.in_place().await;
    let look = || admission::observe(machine.host());
    let view = View { admission: &look, in_place: in_place.as_deref() };
    let seen =
        records::history(machine.host(), view).map_err(|e| Problem::failed("reading the records", &e))?;
    Ok(Json(json!({"upgrades": seen})))
}

/// `GET /v1/upgrades/{id}`: one attempt; with `wait`, as soon as anything of it changes.
pub(super) async fn show(
    AppState(machine): AppState<Arc<Machine>>,
    Path(id): Path<String>,
    Query(wait): Query<Wait>,
) -> Result<Json<Value>, Problem> {
    let longest = match wait.wait.as_deref() {
        None => Duration::ZERO,
        Some(text) => {
            let seconds = text.strip_suffix('s').unwrap_or(text).parse().ok().map(Duration::from_secs);
            seconds.filter(|wait| *wait <= MOST_WAIT).ok_or_else(|| {
                let detail = format!("wait is not 0s to {}s: {text:?}", MOST_WAIT.as_secs());
                Problem::new(StatusCode::UNPROCESSABLE_ENTITY, "wait", detail)
            })?
        }
    };
    let found = if id == "latest" { machine.latest().await? } else { machine.attempt(&id).await? };
    let mut seen = found.ok_or_else(|| {
        Problem::new(StatusCode::NOT_FOUND, "no-such-attempt", format!("there is no record of attempt {id}"))
    })?;
    let known = wait.seen.unwrap_or_else(|| revision(&seen));
    let at_once = longest.is_zero() || seen.state == State::Ended || revision(&seen) != known;
    if at_once {
        return Ok(shown(&seen));
    }
    let Ok(_place) = machine.upgrades.places.try_acquire() else {
        let detail = format!("{MOST_WAITING} requests wait already: ask without wait, or later");
        return Err(Problem::new(StatusCode::SERVICE_UNAVAILABLE, "waiting", detail));
    };
    let id = seen.record.get("id").and_then(Value::as_str).unwrap_or(&id).to_owned();
    let (started, mut ending) = (Instant::now(), machine.ending());
    while started.elapsed() < longest && revision(&seen) == known {
        tokio::select! {
            () = tokio::time::sleep(LOOK) => {}
            // What is known now is the answer: the next daemon knows more.
            _ = ending.wait_for(|ending| *ending) => break,
        }
        match machine.attempt(&id).await? {
            Some(now) => seen = now,
            None => break,
        }
    }
    Ok(shown(&seen))
}

impl Machine {
    /// An attempt as it is now.
    async fn attempt(&self, id: &str) -> Result<Option<Seen>, Problem> {
        let in_place = self.in_place().await;
        let look = || admission::observe(self.host());
        let view = View { admission: &look, in_place: in_place.as_deref() };
        records::find(self.host(), id, view).map_err(|e| unreadable(&e))
    }

    async fn latest(&self) -> Result<Option<Seen>, Problem> {
        let in_place = self.in_place().await;
        let look = || admission::observe(self.host());
        let view = View { admission: &look, in_place: in_place.as_deref() };
        records::latest(self.host(), view).map_err(|e| unreadable(&e))
    }

    /// The digest of the executable in place, read again only when the file is another.
    async fn in_place(&self) -> Option<String> {
        let path = self.host().installed();
        let stamp = |path: &std::path::Path| {
            let stat = stat(path).ok()?;
            Some((stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime, stat.st_ctime))
        };
        let now = stamp(&path)?;
        let cached = self.upgrades.in_place.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some((_, digest)) = cached.filter(|(seen, _)| *seen == now) {
            return Some(digest);
        }
        let digest = tokio::task::spawn_blocking(move || sha256_file(&path)).await.ok()?.ok()?;
        let mut cache = self.upgrades.in_place.lock().unwrap_or_else(PoisonError::into_inner);
        *cache = Some((now, digest.clone()));
        Some(digest)
    }

    /// Who keeps an upgrade from being accepted now, if anyone.
    fn busy(&self) -> Option<Problem> {
        match admission::observe(self.host()) {
            Observed::Installing { holder } => Some(self.installing(holder.as_ref())),
            Observed::Mutating { .. } => Some(self.mutating()),
            // The door decides.
            Observed::Free | Observed::Unknown { .. } => None,
        }
    }

    /// Says who installs, and how far that is.
    pub(super) fn installing(&self, holder: Option<&admission::Holder>) -> Problem {
        let observed = Observed::Installing { holder: holder.cloned() };
        let busy = |stage: &str| {
            let detail = format!("busy: {}{stage}", admission::describe(&observed));
            Problem::new(StatusCode::CONFLICT, "busy", detail)
        };
        let Some(holder) = holder else { return busy("") };
        let view = View { admission: &|| observed.clone(), in_place: None };
        let seen = records::find(self.host(), &holder.attempt, view).ok().flatten();
        let stage = seen.and_then(|seen| Some(seen.record.get("stage")?.as_str()?.to_owned()));
        let at = stage.as_deref().map(|stage| format!(", at {stage}")).unwrap_or_default();
        busy(&at)
            .with("attempt", json!(holder.attempt))
            .with("since", json!(holder.since))
            .with("stage", json!(stage))
    }
}

fn unreadable(e: &ReadError) -> Problem {
    let help = vec!["look at it as root: sudo /usr/local/bin/ployzd status".to_owned()];
    Problem::new(StatusCode::INTERNAL_SERVER_ERROR, "record", e.to_string()).help(help)
}
