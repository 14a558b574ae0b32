//! Services over the Machine API: asked for at the deploy door, which alone reaches Docker. The daemon holds admission and
//! says what is being changed; what was admitted goes on when its client leaves, and when the daemon itself is replaced.

use std::convert::Infallible;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::Json;
use axum::body::{Body, Bytes};
use axum::extract::{Path, State as AppState};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use http_body_util::channel::Channel;
use jiff::Timestamp;
use serde_json::{Value, json};
use tokio::sync::{Semaphore, mpsc, watch};
use tokio::time::Instant;

use super::api::{Machine, Problem};
use crate::deploy::door::{self, Asked, DoorError, Failed, Named, Nothing, Progress, Said};
use crate::deploy::spec;
use crate::lock::Doing;

/// For an answer to a look: Docker's own deadlines are shorter.
const LOOK: Duration = Duration::from_secs(30);
/// Without a word from the worker of a Deploy: longer than any of its stages is silent.
const SILENT: Duration = Duration::from_secs(20 * 60);
/// Looks at the door at once; others wait for a place, and for so long.
const LOOKING: usize = 2;
const PLACE: Duration = Duration::from_secs(20);
/// How old what is known of Docker may be before it is looked at again.
const FRESH: Duration = Duration::from_secs(30);
/// Between two tries to have a Deploy that was cut off ended, and how many there are: Docker may still be starting.
const SETTLE_AGAIN: Duration = Duration::from_secs(5);
const SETTLE_TRIES: u32 = 60;
/// Lines to a client that are not taken yet; more progress is dropped.
const UNTAKEN: usize = 64;

/// What the daemon knows of services by itself: nothing that could not be lost.
#[derive(Debug)]
pub(crate) struct Services {
    places: Semaphore,
    seen: Mutex<Seen>,
}

#[derive(Debug, Default)]
struct Seen {
    docker: Option<(Value, Timestamp, Instant)>,
    /// A Deploy that a daemon before this one asked for.
    doing: Option<Doing>,
    looking: bool,
    /// What is known of Docker is not so any more.
    old: bool,
}

impl Services {
    pub(crate) fn new() -> Self {
        Self { places: Semaphore::new(LOOKING), seen: Mutex::default() }
    }

    fn seen(&self) -> std::sync::MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What was last seen of Docker, and when.
    pub(super) fn docker(&self) -> Value {
        match &self.seen().docker {
            Some((docker, at, _)) => {
                let mut docker = docker.clone();
                docker["seen_at"] = json!(at);
                docker
            }
            None => json!({"state": "unknown"}),
        }
    }

    /// The mutation that a worker goes on with, whose daemon is gone.
    pub(super) fn left_by_another(&self) -> Option<(String, Timestamp)> {
        self.seen().doing.clone().map(|doing| (doing.what, doing.since))
    }

    fn note(&self, docker: Value) {
        self.seen().docker = Some((docker, Timestamp::now(), Instant::now()));
    }
}

/// Looks at Docker again, where what is known of it is old; nobody waits for that.
pub(super) fn look_again(machine: &Arc<Machine>) {
    {
        let mut seen = machine.services.seen();
        let fresh = seen.docker.as_ref().is_some_and(|(.., at)| at.elapsed() < FRESH);
        if (fresh && !seen.old) || seen.looking {
            return;
        }
        seen.looking = true;
        seen.old = false;
    }
    let machine = Arc::clone(machine);
    tokio::spawn(async move {
        look(&machine).await;
        machine.services.seen().looking = false;
    });
}

/// Asks the door what there is. Returns the service whose Deploy was cut off and not ended.
async fn look(machine: &Machine) -> Option<String> {
    let door = machine.host().deploy_door();
    let said = door::ask(&door, &Asked::Info(Nothing {}), LOOK, &mut |_| ()).await;
    let info = match said {
        Ok(Said::Done(info)) => info,
        Ok(_) => return None,
        Err(e) => {
            machine.services.note(json!({"state": "unknown", "why": e.to_string()}));
            return None;
        }
    };
    let mut seen = machine.services.seen();
    seen.doing = serde_json::from_value(info["doing"].clone()).ok();
    seen.docker = Some((info["docker"].clone(), Timestamp::now(), Instant::now()));
    info["unfinished"].as_str().map(str::to_owned)
}

/// What is not needed for the first answer: which Docker there is, and the end of a Deploy that was cut off.
pub(super) async fn after_ready(machine: &Arc<Machine>) {
    if !machine.host().deploy_door().exists() {
        return;
    }
    for _ in 0..SETTLE_TRIES {
        let Some(service) = look(machine).await else { return };
        if machine.services.left_by_another().is_none() {
            let door = machine.host().deploy_door();
            let said = door::ask(&door, &Asked::Settle(Nothing {}), SILENT, &mut |_| ()).await;
            tracing::info!("a Deploy of {service} was cut off: {said:?}");
            if matches!(said, Ok(Said::Done(_))) {
                return;
            }
        }
        tokio::time::sleep(SETTLE_AGAIN).await;
    }
}

/// `GET /v1/services`
pub(super) async fn list(AppState(machine): AppState<Arc<Machine>>) -> Result<Json<Value>, Problem> {
    let full = || {
        let detail = "busy: too many are looking at services; ask again in a moment";
        Problem::new(StatusCode::SERVICE_UNAVAILABLE, "busy", detail)
    };
    let place = tokio::time::timeout(PLACE, machine.services.places.acquire()).await;
    let _place = place.ok().and_then(Result::ok).ok_or_else(full)?;
    let door = machine.host().deploy_door();
    let said = door::ask(&door, &Asked::List(Nothing {}), LOOK, &mut |_| ()).await;
    match said {
        Ok(Said::Done(found)) => {
            let mut docker = found["docker"].clone();
            docker["state"] = "running".into();
            machine.services.note(docker);
            Ok(Json(found))
        }
        Ok(other) => Err(problem(other)),
        Err(e) => Err(unreachable(&e)),
    }
}

/// `POST /v1/services`: 200 when it was seen to work; as lines of progress where the client takes those.
pub(super) async fn deploy(
    AppState(machine): AppState<Arc<Machine>>,
    headers: HeaderMap,
    body: Bytes,
) -> Result<Response, Problem> {
    let spec = spec::read(&body).map_err(|e| Problem::new(StatusCode::UNPROCESSABLE_ENTITY, "body", e))?;
    let what = format!("deploying {}", spec.name);
    change(&machine, &headers, Asked::Deploy(spec), &what).await
}

/// `DELETE /v1/services/{name}`
pub(super) async fn remove(
    AppState(machine): AppState<Arc<Machine>>,
    headers: HeaderMap,
    Path(name): Path<String>,
) -> Result<Response, Problem> {
    if !spec::is_name(&name) {
        let detail = "that is not a service's name: 1 to 40 lower-case letters, digits and dashes";
        return Err(Problem::new(StatusCode::UNPROCESSABLE_ENTITY, "name", detail));
    }
    let what = format!("removing {name}");
    change(&machine, &headers, Asked::Remove(Named { name }), &what).await
}

/// Removes every service, under the admission of who asks for that. A Machine without Docker has none.
pub(super) async fn remove_all(machine: &Arc<Machine>) -> Result<(), Problem> {
    let door = machine.host().deploy_door();
    if !door.exists() {
        return Ok(());
    }
    let ask = |asked: Asked| {
        let door = door.clone();
        async move {
            match door::ask(&door, &asked, SILENT, &mut |_| ()).await {
                Ok(Said::Done(done)) => Ok(done),
                Ok(other) => Err(problem(other)),
                Err(e) => Err(unreachable(&e)),
            }
        }
    };
    if ask(Asked::Info(Nothing {})).await?["docker"]["state"] == "absent" {
        return Ok(());
    }
    let found = ask(Asked::List(Nothing {})).await?;
    let names = found["services"].as_array().into_iter().flatten().filter_map(|s| s["name"].as_str());
    for name in names.map(str::to_owned) {
        ask(Asked::Remove(Named { name })).await?;
    }
    machine.services.seen().old = true;
    Ok(())
}

/// Has something changed under admission, in a task of its own: it goes on when this request's client is gone.
async fn change(
    machine: &Arc<Machine>,
    headers: &HeaderMap,
    asked: Asked,
    what: &str,
) -> Result<Response, Problem> {
    let admission = machine.admit(what)?;
    let (tell, mut told) = mpsc::channel::<Line>(UNTAKEN);
    let (ours, what) = (Arc::clone(machine), what.to_owned());
    tokio::spawn(async move {
        let door = ours.host().deploy_door();
        // A client that is slow or gone is told less; nothing waits for it.
        let mut progress = |progress| drop(tell.try_send(Line::Progress(progress)));
        let said = door::ask(&door, &asked, SILENT, &mut progress).await;
        drop(admission);
        tracing::info!("{what}: {}", if matches!(said, Ok(Said::Done(_))) { "done" } else { "not done" });
        let _ = tell.send(Line::Answer(conclude(&ours, said))).await;
    });
    let streams = headers.get(header::ACCEPT).is_some_and(|accept| accept == "application/x-ndjson");
    let mut ending = machine.ending();
    let first = loop {
        match next(&mut told, &mut ending).await {
            Line::Answer(answer) => return answer.map(|done| Json(done).into_response()),
            Line::Progress(progress) if streams => break progress,
            Line::Progress(_) => {}
        }
    };
    let (mut lines, body) = Channel::<Bytes, Infallible>::new(UNTAKEN);
    tokio::spawn(async move {
        let mut line = Line::Progress(first);
        loop {
            let (event, last) = match &line {
                Line::Progress(progress) => (json!({"event": "progress", "progress": progress}), false),
                Line::Answer(Ok(done)) => (json!({"event": "outcome", "done": done}), true),
                Line::Answer(Err(problem)) => (json!({"event": "outcome", "problem": problem}), true),
            };
            // Nobody takes it any more: nothing is lost by it.
            if lines.send_data(Bytes::from(format!("{event}\n"))).await.is_err() || last {
                return;
            }
            line = next(&mut told, &mut ending).await;
        }
    });
    Ok(([(header::CONTENT_TYPE, "application/x-ndjson")], Body::new(body)).into_response())
}

/// What is told of a change.
enum Line {
    Progress(Progress),
    Answer(Result<Value, Problem>),
}

/// The next thing that is told, or that the daemon ends.
async fn next(told: &mut mpsc::Receiver<Line>, ending: &mut watch::Receiver<bool>) -> Line {
    tokio::select! {
        biased;
        line = told.recv() => line.unwrap_or_else(|| Line::Answer(Err(goes_on()))),
        () = async { drop(ending.wait_for(|ending| *ending).await) } => Line::Answer(Err(goes_on())),
    }
}

/// What the door's answer, or its silence, comes to.
fn conclude(machine: &Arc<Machine>, said: Result<Said, DoorError>) -> Result<Value, Problem> {
    match said {
        Ok(Said::Done(done)) => {
            // How many containers run is another number now.
            machine.services.seen().old = true;
            look_again(machine);
            Ok(done)
        }
        Ok(other) => Err(problem(other)),
        Err(e) if e.was_not_asked() => Err(unreachable(&e)),
        Err(e) => {
            let detail = format!("{e}: whether it was done is not known");
            let help = vec!["see what runs: ployzd service list".to_owned()];
            Err(Problem::new(StatusCode::INTERNAL_SERVER_ERROR, "unknown", detail).help(help))
        }
    }
}

fn problem(said: Said) -> Problem {
    match said {
        Said::Busy { what, since } => {
            let at = since.map(|since| format!(" since {}", since.strftime("%H:%M:%S UTC")));
            let at = at.filter(|_| !what.contains(" since ")).unwrap_or_default();
            let busy = Problem::new(StatusCode::CONFLICT, "busy", format!("busy: {what}{at}"));
            busy.with("what", json!(what)).with("since", json!(since))
        }
        Said::Failed(Failed { reason, error, now, help }) => {
            let status = match reason.as_str() {
                "docker" | "no_admission" => StatusCode::SERVICE_UNAVAILABLE,
                "no_such_service" => StatusCode::NOT_FOUND,
                "port" | "not_ours" | "engine_changed" => StatusCode::CONFLICT,
                "state" => StatusCode::INTERNAL_SERVER_ERROR,
                _ => StatusCode::UNPROCESSABLE_ENTITY,
            };
            let kind = format!("service-{}", reason.replace('_', "-"));
            Problem::new(status, &kind, error).help(help).with("now", json!(now))
        }
        Said::Progress(_) | Said::Done(_) => {
            Problem::new(StatusCode::INTERNAL_SERVER_ERROR, "failed", "the deploy door's answer is none")
        }
    }
}

fn unreachable(e: &DoorError) -> Problem {
    let help = vec![
        "look at it: systemctl status ployz-deploy.socket".to_owned(),
        "let install repair it: sudo /usr/local/bin/ployzd install".to_owned(),
    ];
    Problem::new(StatusCode::SERVICE_UNAVAILABLE, "door-unreachable", e.to_string()).help(help)
}

/// The daemon ends; the worker does not.
fn goes_on() -> Problem {
    let help = vec!["see what becomes of it: ployzd service list".to_owned()];
    let detail = "the daemon is ending; what was asked for goes on in its worker";
    Problem::new(StatusCode::SERVICE_UNAVAILABLE, "goes-on", detail).help(help)
}
