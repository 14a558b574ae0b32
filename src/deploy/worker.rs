//! The deploy worker: one process for one connection of the deploy door, as an account that may ask Docker and nothing
//! else.
//!
//! 1. who asks? root or the daemon's account, and nobody else;
//! 2. one line, bounded in size and time, read into a type that has no field for more than may be had;
//! 3. a change takes admission, and the lock that says who deploys; a look takes nothing;
//! 4. what was observed is the answer. Nothing depends on the asker: one who leaves is told nothing more, and what was
//!    accepted is finished.
//!
//! SIGTERM in the middle puts back what served; what even that did not end, [`ended`] does, or the next request.

use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use jiff::Timestamp;
use nix::sys::socket::{getsockopt, sockopt};
use serde_json::{Value, json};
use tokio::signal::unix::{SignalKind, signal};

use super::door::{self, Asked, Failed, Named, Said};
use super::engine::{self, failed};
use super::replace::{self, Work};
use super::state::Replacing;
use crate::docker::Docker;
use crate::host::Host;
use crate::install::admission::{self, AdmissionError, MutationAdmission, Observed};
use crate::line;
use crate::lock::{self, Described, Doing};

/// For an answer that nobody takes.
const ANSWER: Duration = Duration::from_secs(2);
/// For putting back what served, when this worker is asked to end.
const SETTLE: Duration = Duration::from_secs(15);

/// Serves the connection that is standard input.
///
/// # Errors
/// It is no connection, or the system refused what can't be done without.
pub(crate) fn serve(host: &Host) -> io::Result<()> {
    let mut connection = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    // Fails for everything but a socket.
    connection.peer_addr()?;
    if let Some(why) = peer_problem(host, &connection) {
        answer(&mut connection, &Said::Failed(failed("not_permitted", why, "")));
        return Ok(());
    }
    let asked =
        line::read_line(&mut connection, door::MOST_REQUEST).and_then(|line| door::read_request(&line));
    let asked = match asked {
        Ok(asked) => asked,
        Err(e) => {
            answer(&mut connection, &Said::Failed(failed("request", e, "")));
            return Ok(());
        }
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut gone = false;
    let mut tell_to = connection.try_clone()?;
    let said = runtime.block_on(carry_out(host, asked, &mut |progress| {
        // A client that takes nothing shall not hold anything up, either.
        gone = gone || !answer(&mut tell_to, &Said::Progress(progress));
    }))?;
    if !answer(&mut connection, &said) {
        tracing::info!("nobody took the answer: {}", short(&said));
    }
    Ok(())
}

async fn carry_out(
    host: &Host,
    asked: Asked,
    tell: &mut (dyn FnMut(door::Progress) + Send),
) -> io::Result<Said> {
    let docker = Docker::at(host.docker());
    let what = match &asked {
        Asked::List(_) => return Ok(said(engine::list(host, &docker).await)),
        Asked::Info(_) => return Ok(Said::Done(info(host, &docker).await)),
        Asked::Deploy(spec) => format!("deploying {}", spec.name),
        Asked::Remove(Named { name }) => format!("removing {name}"),
        Asked::Settle(_) => "ending a Deploy that was cut off".to_owned(),
    };
    let doing = Doing { what, since: Timestamp::now() };
    // Admission first: who installs is more than who deploys.
    let _admission = match MutationAdmission::try_take(host) {
        Ok(admission) => admission,
        Err(AdmissionError::Busy(busy)) => {
            let since = match &busy.observed {
                Observed::Installing { holder } => holder.as_ref().map(|holder| holder.since),
                _ => None,
            };
            return Ok(Said::Busy { what: admission::describe(&busy.observed), since });
        }
        Err(e) => {
            let help = "let install repair it: sudo /usr/local/bin/ployzd install";
            return Ok(Said::Failed(failed("no_admission", e, help)));
        }
    };
    let _lock = match Described::try_take(&host.deploy_lock(), &doing)? {
        Ok(lock) => lock,
        Err(other) => {
            let since = other.as_ref().map(|other| other.since);
            let what = other.map_or_else(|| "another Deploy".into(), |other| other.what);
            return Ok(Said::Busy { what, since });
        }
    };
    tracing::info!("{}", doing.what);
    let mut terminate = signal(SignalKind::terminate())?;
    let mut work = Work { host, docker: &docker, tell };
    let done = tokio::select! {
        done = change(&mut work, asked) => Some(done),
        _ = terminate.recv() => None,
    };
    let said = said(match done {
        Some(done) => done,
        None => Err(interrupted(&mut work).await),
    });
    tracing::info!("{}: {}", doing.what, short(&said));
    Ok(said)
}

async fn change(work: &mut Work<'_>, asked: Asked) -> Result<Value, Failed> {
    match asked {
        Asked::Deploy(spec) => replace::deploy(work, &spec).await,
        Asked::Remove(Named { name }) => replace::remove_service(work, &name).await,
        Asked::Settle(_) | Asked::List(_) | Asked::Info(_) => {
            replace::settle(work).await.map(|settled| json!({"settled": settled}))
        }
    }
}

/// This worker is asked to end in the middle.
async fn interrupted(work: &mut Work<'_>) -> Failed {
    let settled = tokio::time::timeout(SETTLE, replace::settle(work)).await;
    let now = match settled {
        Ok(Ok(None)) => "what served before is untouched".to_owned(),
        Ok(Ok(Some(now))) => now,
        Ok(Err(e)) => format!("what was begun is not ended ({})", e.error),
        Err(_) => format!("what was begun is not ended within {} s", SETTLE.as_secs()),
    };
    let error = "SIGTERM: its unit was stopped or ran out of time, or the system went down";
    Failed { now, ..failed("interrupted", error, "see what runs: ployzd service list") }
}

/// Which Docker there is, who deploys now, and whether something is left to be ended. Never fails.
async fn info(host: &Host, docker: &Docker) -> Value {
    let engine = match docker.engine().await {
        Ok(engine) => {
            let mut shown = serde_json::to_value(engine).unwrap_or_default();
            shown["state"] = "running".into();
            shown
        }
        Err(e) => json!({"state": state_of(&e), "why": e.to_string(), "help": e.help()}),
    };
    json!({
        "docker": engine, "doing": lock::doing(&host.deploy_lock()),
        "unfinished": Replacing::read(host).map(|replacing| replacing.service),
    })
}

fn state_of(e: &crate::docker::DockerError) -> &'static str {
    use crate::docker::DockerError;
    match e {
        DockerError::Absent(_) => "absent",
        DockerError::Stopped(_) => "stopped",
        DockerError::NotPermitted(_) => "not_permitted",
        DockerError::Slow { .. } | DockerError::Broken { .. } => "not_answering",
        DockerError::Foreign(_) | DockerError::TooOld { .. } | DockerError::TooNew { .. } => "not_usable",
        DockerError::Refused { .. } | DockerError::NotUnderstood { .. } => "unknown",
    }
}

/// After the unit of a worker has ended, however it did: ends what it had begun. A worker that is alive does that itself.
///
/// # Errors
/// The system's.
pub(crate) fn ended(host: &Host) -> io::Result<()> {
    if Replacing::read(host).is_none() {
        return Ok(());
    }
    let doing = Doing { what: "ending a Deploy that was cut off".into(), since: Timestamp::now() };
    let Ok(_lock) = Described::try_take(&host.deploy_lock(), &doing)? else { return Ok(()) };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let docker = Docker::at(host.docker());
    let mut work = Work { host, docker: &docker, tell: &mut |_| () };
    let settled = runtime.block_on(async { tokio::time::timeout(SETTLE, replace::settle(&mut work)).await });
    match settled {
        Ok(Ok(settled)) => tracing::warn!("{}", settled.unwrap_or_default()),
        Ok(Err(e)) => tracing::warn!("a Deploy that was cut off could not be ended: {}", e.error),
        Err(_) => {
            tracing::warn!("a Deploy that was cut off could not be ended within {} s", SETTLE.as_secs());
        }
    }
    Ok(())
}

fn said(done: Result<Value, Failed>) -> Said {
    done.map_or_else(Said::Failed, Said::Done)
}

fn short(said: &Said) -> String {
    serde_json::to_string(said).unwrap_or_default().chars().take(300).collect()
}

/// Root and the daemon's account may ask; the door's mode says the same.
fn peer_problem(host: &Host, connection: &UnixStream) -> Option<String> {
    let peer = match getsockopt(connection, sockopt::PeerCredentials) {
        Ok(peer) => peer.uid(),
        Err(e) => return Some(format!("who asks can't be seen: {e}")),
    };
    let daemon = host.account("ployz").map(|account| account.uid);
    (peer != 0 && Some(peer) != daemon).then(|| format!("uid {peer} may not ask for a Deploy here"))
}

/// Sends a line; `false` when nobody took it.
fn answer(connection: &mut UnixStream, said: &Said) -> bool {
    let mut line = serde_json::to_vec(said).unwrap_or_default();
    line.push(b'\n');
    connection.set_write_timeout(Some(ANSWER)).is_ok() && connection.write_all(&line).is_ok()
}
