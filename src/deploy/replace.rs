//! A Deploy: image, volumes and the new container are there before the old one stops; the old one serves again when the
//! new one does not. What was begun is written before the old container is touched, so that whoever comes after a crash
//! can end it, and so that exactly one of the two runs after a boot in the middle:
//!
//! | from | to | the old container | the new one |
//! | --- | --- | --- | --- |
//! | begun | committed | starts at boot (policy `always`) though it is stopped | does not |
//! | committed | finished | is removed | is started, if it does not run |

use std::time::Duration;

use hyper::Method;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use super::door::{Failed, Progress};
use super::engine::{self, Container, engine_changed, failed};
use super::pull;
use super::spec::{Pull, Spec};
use super::state::{Memory, Old, Replacing};
use super::template::{self, SERVICE, container_name, next_name};
use crate::docker::{ANSWER, Docker, DockerError, Engine, escaped};
use crate::host::Host;
use crate::text::printable;

/// For a container to end by itself when it is stopped, in seconds; then Docker kills it.
const GRACE: u64 = 10;
/// For Docker's answer to a stop, a start or a removal.
const CHANGE: Duration = Duration::from_secs(40);
/// How long a container without a health check must have run.
const STEADY: Duration = Duration::from_secs(2);
/// Between two looks at it.
const LOOK: Duration = Duration::from_millis(200);
/// For Docker to be back, when something has to be ended.
const BACK: Duration = Duration::from_secs(60);
const AGAIN: Duration = Duration::from_secs(1);

/// A worker's view of what it works on.
pub(super) struct Work<'a> {
    pub(super) host: &'a Host,
    pub(super) docker: &'a Docker,
    pub(super) tell: &'a mut (dyn FnMut(Progress) + Send),
}

impl Work<'_> {
    pub(super) fn stage(&mut self, stage: &str, detail: impl Into<Option<String>>) {
        let detail = detail.into();
        tracing::info!("{stage} {}", detail.as_deref().unwrap_or_default());
        (self.tell)(Progress { stage: stage.into(), detail, bytes: None, total: None });
    }
}

/// Deploys a service. What was observed, or why not and what serves now.
pub(super) async fn deploy(work: &mut Work<'_>, spec: &Spec) -> Result<Value, Failed> {
    let (host, docker) = (work.host, work.docker);
    let unchanged = |mut failed: Failed| {
        failed.now = "nothing of the service was changed".into();
        failed
    };
    let engine = docker.engine().await.map_err(|e| unchanged(e.into()))?;
    let mut memory = Memory::read(host);
    if let Some(why) = memory.another(&engine) {
        return Err(unchanged(engine_changed(why)));
    }
    settle(work).await.map_err(unchanged)?;
    let old = engine::find(docker, &spec.name, false).await.map_err(unchanged)?;
    let image = image(work, spec).await.map_err(unchanged)?;
    if let Some(old) = old.as_ref().filter(|old| old.running && old.spec == template::digest(spec, &image)) {
        remember(host, &mut memory, &engine, &spec.name);
        return Ok(json!({"service": spec.name, "container": old.id, "nothing_was_needed": true}));
    }
    if let Some(why) = engine::port_in_use(docker, spec, old.as_ref()).await.map_err(unchanged)? {
        return Err(unchanged(failed("port", why, "see who listens: ss -ltnup; or publish another port")));
    }
    let (next, volumes) = create(work, spec, &image).await.map_err(unchanged)?;
    let kept = old.as_ref().map(|old| Old {
        id: old.id.clone(),
        running: old.running,
        restart: old.wanted_restart.clone(),
    });
    let mut replacing = Replacing::new(&spec.name, kept, &next);
    if let Err(e) = replacing.write(host) {
        if let Err(e) = unmake(docker, Some(&next), &volumes).await {
            tracing::warn!("removing what was made for {}: {e}", spec.name);
        }
        let help = format!("look at: df -h {}", host.deploy_state().display());
        return Err(unchanged(failed("state", format!("writing what is begun: {e}"), help)));
    }
    if let Err(mut why) = take_its_place(work, spec, old.as_ref(), &next).await {
        why.now = back(work, &replacing).await.unwrap_or_else(|e| unfinished(&e));
        return Err(why);
    }
    replacing.committed = true;
    let committed =
        replacing.write(host).map_err(|e| failed("state", format!("writing what is done: {e}"), ""));
    if let Err(mut why) = committed {
        why.now = back(work, &replacing).await.unwrap_or_else(|e| unfinished(&e));
        return Err(why);
    }
    remember(host, &mut memory, &engine, &spec.name);
    forward(work, &replacing).await.map_err(|mut e| {
        e.now = format!("the new container serves; {}", unfinished(&e));
        e
    })?;
    let replaced = old.map(|old| old.id);
    Ok(
        json!({"service": spec.name, "container": next, "replaced": replaced, "volumes": volumes, "image": image}),
    )
}

fn unfinished(e: &Failed) -> String {
    format!("what was begun is not ended ({}): it is ended by the next request", e.error)
}

fn remember(host: &Host, memory: &mut Memory, engine: &Engine, service: &str) {
    if let Err(e) = memory.add(host, engine, service) {
        tracing::warn!("noting that {service} is deployed: {e}");
    }
}

/// The id of the image, pulled where that is asked for.
async fn image(work: &mut Work<'_>, spec: &Spec) -> Result<String, Failed> {
    let docker = work.docker;
    let path = format!("/images/{}/json", escaped(&spec.image));
    let found = docker.find(&path).await?;
    let pull = match (spec.pull, &found) {
        (Pull::Always, _) | (Pull::Missing, None) => true,
        (Pull::Never, None) => {
            let error = format!("image {} is not here, and is not to be pulled", spec.image);
            return Err(failed("image", error, format!("pull it: docker pull {}", spec.image)));
        }
        (Pull::Missing | Pull::Never, Some(_)) => false,
    };
    let found = if pull {
        pull::pull(work, spec).await?;
        docker.find(&path).await?
    } else {
        found
    };
    let Some(found) = found else {
        return Err(failed("image", format!("image {} was pulled and is not here", spec.image), ""));
    };
    if found["Config"]["Labels"]
        .as_object()
        .is_some_and(|labels| labels.keys().any(|k| k.starts_with("ployz.")))
    {
        let error = format!("image {} bears a label of Ployz's own (ployz.*): it is not used", spec.image);
        return Err(failed("image", error, "build it without that label"));
    }
    match found["Id"].as_str() {
        Some(id) => Ok(id.to_owned()),
        None => Err(failed("image", format!("Docker names no id for image {}", spec.image), "")),
    }
}

/// Makes the volumes that are missing and the new container, which is not started. Its id, and the volumes made.
async fn create(work: &mut Work<'_>, spec: &Spec, image: &str) -> Result<(String, Vec<String>), Failed> {
    let (host, docker) = (work.host, work.docker);
    work.stage("creating", container_name(&spec.name));
    // Left by one that was cut off before it was written.
    if let Some(left) = engine::find(docker, &spec.name, true).await? {
        remove(docker, &left.id, true).await?;
    }
    let mut made = Vec::new();
    let created = async {
        for volume in &spec.volumes {
            if engine::volume(host, docker, &spec.name, volume).await? {
                made.push(volume.name.clone());
            }
        }
        let path = format!("/containers/create?name={}", escaped(&next_name(&spec.name)));
        let created = docker.call(Method::POST, &path, Some(&template::container(spec, image)), CHANGE).await;
        let created = created.map_err(|e| match e {
            DockerError::Refused { message, .. } => {
                failed("create", format!("Docker does not make the container: {message}"), "")
            }
            e => e.into(),
        })?;
        match created["Id"].as_str() {
            Some(id) => Ok(id.to_owned()),
            None => Err(failed("create", "Docker made a container without an id", "")),
        }
    };
    match created.await {
        Ok(id) => Ok((id, made)),
        Err(e) => {
            let _ = unmake(docker, None, &made).await;
            Err(e)
        }
    }
}

/// Removes a container that was never started, and volumes that were made for it: they are empty, and nobody has seen them.
async fn unmake(docker: &Docker, container: Option<&str>, volumes: &[String]) -> Result<(), DockerError> {
    if let Some(id) = container {
        remove(docker, id, true).await?;
    }
    for name in volumes {
        docker.call(Method::DELETE, &format!("/volumes/{name}"), None, ANSWER).await?;
    }
    Ok(())
}

/// The old container stops, the new one starts and is seen to work.
async fn take_its_place(
    work: &mut Work<'_>,
    spec: &Spec,
    old: Option<&Container>,
    next: &str,
) -> Result<(), Failed> {
    let docker = work.docker;
    if let Some(old) = old.filter(|old| old.running) {
        work.stage("stopping", container_name(&spec.name));
        // From here on until the end a boot starts the old one, stopped as it is.
        update(docker, &old.id, "always").await?;
        stop(docker, &old.id).await?;
    }
    work.stage("starting", spec.image.clone());
    let started = docker.call(Method::POST, &format!("/containers/{next}/start"), None, CHANGE).await;
    started.map_err(|e| match e {
        DockerError::Refused { message, .. } => {
            failed("start", format!("the new container does not start: {message}"), "")
        }
        e => e.into(),
    })?;
    let how = match &spec.health {
        Some(_) => "until it is healthy".to_owned(),
        None => format!("whether it runs for {} s", STEADY.as_secs()),
    };
    work.stage("watching", how);
    works(docker, spec, next).await
}

/// Waits until the container is seen to work: healthy where it has a health check, else running for a moment.
async fn works(docker: &Docker, spec: &Spec, id: &str) -> Result<(), Failed> {
    let started = Instant::now();
    let longest = spec.health.as_ref().map_or(Duration::from_secs(120), |health| {
        let tries = u64::from(health.retries + 1) * u64::from(health.interval + health.timeout);
        Duration::from_secs((u64::from(health.start) + tries + 10).min(900))
    });
    loop {
        let shown = docker.get(&format!("/containers/{id}/json")).await?;
        let state = &shown["State"];
        if !state["Running"].as_bool().unwrap_or_default() {
            let words = docker.last_words(id).await;
            let code = state["ExitCode"].as_i64().unwrap_or_default();
            let error = format!("the new container exited with status {code}{}", said(&words));
            return Err(failed("exited", error, ""));
        }
        match state["Health"]["Status"].as_str() {
            Some("healthy") => return Ok(()),
            Some("unhealthy") => {
                let last = state["Health"]["Log"].as_array().and_then(|log| log.last());
                let said_last =
                    last.and_then(|last| last["Output"].as_str()).map(printable).unwrap_or_default();
                let error = format!("the new container is not healthy{}", said(&said_last));
                return Err(failed("unhealthy", error, ""));
            }
            Some("starting") if started.elapsed() < longest => {}
            Some("starting") => {
                let error = format!("the new container was not healthy within {} s", longest.as_secs());
                return Err(failed("unhealthy", error, ""));
            }
            // None: it has no health check.
            _ if started.elapsed() >= STEADY => return Ok(()),
            _ => {}
        }
        sleep(LOOK).await;
    }
}

fn said(words: &str) -> String {
    let tail: String = words.chars().rev().take(300).collect::<Vec<_>>().into_iter().rev().collect();
    if tail.is_empty() { String::new() } else { format!("; it said: {tail}") }
}

/// Ends a replacement that was cut off, if there is one: forward when the new container was seen to work, else back.
pub(super) async fn settle(work: &mut Work<'_>) -> Result<Option<String>, Failed> {
    let Some(replacing) = Replacing::read(work.host) else { return Ok(None) };
    let now = if replacing.committed {
        forward(work, &replacing).await?;
        "the new container serves".to_owned()
    } else {
        back(work, &replacing).await?
    };
    Ok(Some(format!("a replacement of {} that was cut off is ended: {now}", replacing.service)))
}

/// The old container serves again and the new one is gone. Says what serves.
async fn back(work: &mut Work<'_>, replacing: &Replacing) -> Result<String, Failed> {
    work.stage("restoring", container_name(&replacing.service));
    let now = while_docker_is_away(async || {
        let docker = work.docker;
        if let Some(next) = ours(docker, &replacing.next, &replacing.service).await? {
            remove(docker, &next.id, true).await?;
        }
        let Some(old) = &replacing.old else { return Ok("no container of this service is there".to_owned()) };
        let Some(found) = ours(docker, &old.id, &replacing.service).await? else {
            return Ok("the old container is gone".to_owned());
        };
        if old.running && !found.running {
            docker.call(Method::POST, &format!("/containers/{}/start", old.id), None, CHANGE).await?;
        }
        update(docker, &old.id, &old.restart).await?;
        let found = ours(docker, &old.id, &replacing.service).await?;
        Ok(match (old.running, found.is_some_and(|found| found.running)) {
            (true, true) => "the old container serves again".to_owned(),
            (true, false) => "the old container was started and does not run".to_owned(),
            (false, _) => "the old container is as it was, not running".to_owned(),
        })
    });
    let now = now.await?;
    end(work.host)?;
    Ok(now)
}

/// The new container has the name and the restart policy, and the old one is gone.
async fn forward(work: &mut Work<'_>, replacing: &Replacing) -> Result<(), Failed> {
    work.stage("finishing", container_name(&replacing.service));
    let ended = while_docker_is_away(async || {
        let docker = work.docker;
        let Some(next) = ours(docker, &replacing.next, &replacing.service).await? else {
            return Err(failed("state", "the new container is gone", "deploy it again"));
        };
        if let Some(old) = &replacing.old
            && let Some(found) = ours(docker, &old.id, &replacing.service).await?
        {
            update(docker, &found.id, "no").await?;
            remove(docker, &found.id, false).await?;
        }
        let name = container_name(&replacing.service);
        if next.shown["Name"].as_str() != Some(&format!("/{name}")) {
            let path = format!("/containers/{}/rename?name={}", next.id, escaped(&name));
            docker.call(Method::POST, &path, None, ANSWER).await?;
        }
        update(docker, &next.id, &next.wanted_restart).await?;
        if !next.running {
            docker.call(Method::POST, &format!("/containers/{}/start", next.id), None, CHANGE).await?;
        }
        Ok(())
    });
    ended.await?;
    end(work.host)
}

fn end(host: &Host) -> Result<(), Failed> {
    Replacing::end(host).map_err(|e| failed("state", format!("forgetting what was begun: {e}"), ""))
}

/// Does it, and does it again while Docker itself is away: to a deadline.
async fn while_docker_is_away<T>(mut what: impl AsyncFnMut() -> Result<T, Failed>) -> Result<T, Failed> {
    let started = Instant::now();
    loop {
        match what().await {
            Err(e) if e.reason == "docker" && started.elapsed() < BACK => sleep(AGAIN).await,
            other => return other,
        }
    }
}

/// A container by its id, if it is there and is one of this service.
async fn ours(docker: &Docker, id: &str, service: &str) -> Result<Option<Container>, Failed> {
    let found = engine::by_id(docker, id).await?;
    Ok(found.filter(|found| found.shown["Config"]["Labels"][SERVICE].as_str() == Some(service)))
}

/// Removes a service: its container, whatever state that is in. Volumes and the image stay.
pub(super) async fn remove_service(work: &mut Work<'_>, service: &str) -> Result<Value, Failed> {
    let (host, docker) = (work.host, work.docker);
    let engine = docker.engine().await?;
    let mut memory = Memory::read(host);
    let another = memory.another(&engine);
    if another.is_none() {
        settle(work).await?;
    }
    let found = engine::find(docker, service, false).await?;
    let known = memory.services.contains(service);
    let Some(found) = found else {
        memory
            .forget(host, service)
            .map_err(|e| failed("state", format!("forgetting {service}: {e}"), ""))?;
        if known {
            let gone = another.unwrap_or_else(|| "its container was gone already".into());
            return Ok(json!({"service": service, "container": null, "note": gone}));
        }
        return Err(failed(
            "no_such_service",
            format!("there is no service {service}"),
            "see: ployzd service list",
        ));
    };
    work.stage("stopping", container_name(service));
    update(docker, &found.id, "no").await?;
    if found.running {
        stop(docker, &found.id).await?;
    }
    remove(docker, &found.id, false).await?;
    if engine::find(docker, service, false).await?.is_some() {
        return Err(failed(
            "remove",
            format!("the container of {service} was removed and is there all the same"),
            "",
        ));
    }
    memory.forget(host, service).map_err(|e| failed("state", format!("forgetting {service}: {e}"), ""))?;
    let mounts = found.shown["Mounts"].as_array().into_iter().flatten();
    let volumes: Vec<&Value> = mounts.map(|mount| &mount["Name"]).filter(|name| name.is_string()).collect();
    Ok(json!({"service": service, "container": found.id, "kept_volumes": volumes}))
}

async fn update(docker: &Docker, id: &str, restart: &str) -> Result<(), DockerError> {
    let policy = if restart.is_empty() { "no" } else { restart };
    let body = template::restart_policy(policy);
    docker.call(Method::POST, &format!("/containers/{id}/update"), Some(&body), ANSWER).await.map(drop)
}

async fn stop(docker: &Docker, id: &str) -> Result<(), DockerError> {
    docker.call(Method::POST, &format!("/containers/{id}/stop?t={GRACE}"), None, CHANGE).await.map(drop)
}

/// Removes a container by force; with `its_volumes` those without a name, which it made itself and nobody has used.
async fn remove(docker: &Docker, id: &str, its_volumes: bool) -> Result<(), DockerError> {
    let path = format!("/containers/{id}?force=1&v={}", u8::from(its_volumes));
    match docker.call(Method::DELETE, &path, None, CHANGE).await {
        Err(e) if e.status() == Some(404) => Ok(()),
        other => other.map(drop),
    }
}
