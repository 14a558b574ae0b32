//! The worker: root for one attempt, started by systemd for one connection of the door.
//!
//! 1. who asks? root or the daemon's account, and nobody else;
//! 2. is admission taken? Then it is said at once;
//! 3. *staging copy and re-execution*: from here on this process does not need what it will replace;
//! 4. one line, bounded in size and time;
//! 5. a known id? Then its record;
//! 6. *admit* and *accept*: the record is durable;
//! 7. the answer, and the connection is closed: nothing depends on the asker from here on;
//! 8. the stages of [`super::flow`].
//!
//! A refusal is an answer, and no failure of the worker.

use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use nix::sys::socket::{getsockopt, sockopt};
use serde_json::Value;

use super::admission::{self, Admission, Observed};
use super::attempt::Record;
use super::door::{self, Answer, Asked};
use super::events::{Event, Refusal, What};
use super::flow::Flow;
use super::records::{self, Entry, Progress};
use super::release::Version;
use super::source::Settings;
use super::staging::{self, RunsFrom};
use super::{Mode, Release, Request, Source, Wanted};
use crate::host::Host;
use crate::interrupt::Interrupt;
use crate::line;

/// What the stages of an attempt may take together: less than `RuntimeMaxSec=` of the worker's unit.
pub(crate) const MOST_TIME: Duration = Duration::from_secs(14 * 60);
/// Between two counts of the bytes that have come.
const COUNT: Duration = Duration::from_millis(250);

/// Why nothing could be served.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WorkerError {
    /// It was not started by its socket unit.
    #[error("standard input is not a connection to the upgrade door: {0}")]
    NoConnection(io::Error),
    /// The copy that it must run from can't be made.
    #[error("running from staging: {0}")]
    Copy(io::Error),
}

/// Serves the connection that is standard input. Returns the record of an attempt that was accepted here, whose outcome
/// says how it ended; none when the request was refused.
pub(crate) fn serve(
    host: &Host,
    own_version: Version,
    interrupt: &Interrupt,
) -> Result<Option<Record>, WorkerError> {
    let mut connection = connection().map_err(WorkerError::NoConnection)?;
    let from = staging::runs_from(host).map_err(WorkerError::Copy)?;
    let copied = match &from {
        RunsFrom::OwnCopy(dir) => {
            staging::unlink_own_copy(dir);
            true
        }
        RunsFrom::Installation | RunsFrom::Elsewhere => false,
    };
    if !copied {
        // What can be refused before anything is made for it.
        let refusal = match peer_problem(host, &connection) {
            Some(reason) => Some(rejected(reason)),
            None => busy(&admission::observe(host)),
        };
        if let Some(refusal) = refusal {
            refuse(connection, &refusal);
            return Ok(None);
        }
        let copy = staging::copy_of_own(host).map_err(WorkerError::Copy)?;
        return Err(WorkerError::Copy(staging::become_program(&copy, None, &[])));
    }
    let asked = match line::read_line(&mut connection, door::MOST_REQUEST)
        .and_then(|line| door::read_request(&line))
    {
        Ok(asked) => asked,
        Err(e) => {
            refuse(connection, &rejected(e));
            return Ok(None);
        }
    };
    match admit(host, own_version, &asked, interrupt) {
        Ok((order, admission)) => Ok(carry_out(host, &order, admission, interrupt, connection)),
        Err(answer) => {
            refuse(connection, &answer);
            Ok(None)
        }
    }
}

/// Accepts, answers, and does it.
fn carry_out(
    host: &Host,
    order: &Order,
    admission: Admission,
    interrupt: &Interrupt,
    connection: UnixStream,
) -> Option<Record> {
    let mut counted = Instant::now();
    let mut tell = |event: &Event<'_>| {
        if let What::Progress { attempt, bytes, total } = event.what
            && (counted.elapsed() >= COUNT || Some(bytes) == total)
        {
            counted = Instant::now();
            // Of no importance: who follows sees less.
            let _ = records::show_progress(host, attempt, Progress { bytes, total });
        }
        Ok(())
    };
    let Order { settings, shortened, request, release } = order;
    let mut flow = match Flow::accept(host, settings, request, release, admission, interrupt, &mut tell) {
        Ok(flow) => flow,
        Err(e) => {
            refuse(connection, &refused(&e));
            return None;
        }
    };
    flow.record.warnings.extend(shortened.clone());
    let record = serde_json::to_value(&flow.record).unwrap_or_default();
    if let Err(e) = door::answer(connection, &Answer::Accepted(record)) {
        tracing::info!(ployz_attempt = flow.record.id, "nobody took the answer ({e}): the attempt goes on");
    }
    let ended = flow.carry_out(release).ok();
    if let Some(record) = &ended {
        records::end_progress(host, &record.id);
    }
    ended
}

/// What was asked for, checked against what root has set.
struct Order {
    settings: Settings,
    /// What is worth knowing of the deadlines.
    shortened: Option<String>,
    request: Request,
    release: Release,
}

/// Everything that can be said of a request before it is accepted, and admission.
fn admit(
    host: &Host,
    own_version: Version,
    asked: &Asked,
    interrupt: &Interrupt,
) -> Result<(Order, Admission), Answer> {
    if let Some(answer) = known(host, asked) {
        return Err(answer);
    }
    if interrupt.terminated() {
        return Err(rejected("the worker is being stopped"));
    }
    super::can_run_children(host).map_err(|e| refused(&e))?;
    let mut settings = Settings::read(host).map_err(rejected)?;
    let shortened = settings.deadlines.fit(MOST_TIME);
    let wanted = Wanted::Exact(asked.version);
    let selected = super::select(host, &settings, wanted, asked.channel, own_version, interrupt);
    let (version, requested) = selected.map_err(|e| refused(&e.into()))?;
    let release = Release { version, requested, source: Source::Published { sums: None } };
    let request = Request {
        wanted,
        label: asked.channel,
        local: None,
        mode: Mode::Upgrade,
        docker: None,
        storage: None,
        operators: Vec::new(),
        own_version,
    };
    let admission = super::admit_as(host, "upgrade", &asked.attempt).map_err(|e| refused(&e))?;
    // Another worker may have served this id since it was looked up.
    match known(host, asked) {
        Some(answer) => Err(answer),
        None => Ok((Order { settings, shortened, request, release }, admission)),
    }
}

/// The connection that systemd passed.
fn connection() -> io::Result<UnixStream> {
    let connection = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    // Fails for everything but a socket.
    connection.peer_addr()?;
    Ok(connection)
}

/// Root and the daemon's account may ask; the door's mode says the same.
fn peer_problem(host: &Host, connection: &UnixStream) -> Option<String> {
    let peer = match getsockopt(connection, sockopt::PeerCredentials) {
        Ok(peer) => peer.uid(),
        Err(e) => return Some(format!("who asks can't be seen: {e}")),
    };
    let daemon = host.account("ployz").map(|account| account.uid);
    (peer != 0 && Some(peer) != daemon).then(|| format!("uid {peer} may not ask for an upgrade here"))
}

/// What is known of this id already.
fn known(host: &Host, asked: &Asked) -> Option<Answer> {
    let (record, target) = match records::entry(host, &asked.attempt) {
        Ok(None) => return None,
        // Moved aside by the attempt that comes next.
        Err(records::ReadError::Damaged { .. }) => return None,
        Err(e) => return Some(rejected(e)),
        Ok(Some(Entry::Record(record))) => {
            let target = record.target.map(|target| target.to_string());
            (serde_json::to_value(record).unwrap_or_default(), target)
        }
        Ok(Some(Entry::Newer(record))) => {
            let target = record.get("target").and_then(Value::as_str).map(str::to_owned);
            (Value::Object(record), target)
        }
    };
    let same = target == Some(asked.version.to_string());
    Some(if same { Answer::Existing(record) } else { Answer::Conflict(record) })
}

fn busy(observed: &Observed) -> Option<Answer> {
    let attempt = match observed {
        Observed::Installing { holder } => holder.as_ref().map(|holder| holder.attempt.clone()),
        Observed::Mutating { .. } => None,
        // Taking admission says what is wrong.
        Observed::Free | Observed::Unknown { .. } => return None,
    };
    Some(Answer::Busy { what: admission::describe(observed), attempt })
}

#[allow(clippy::needless_pass_by_value, reason = "errors come as they are")]
fn rejected(reason: impl ToString) -> Answer {
    Answer::Rejected { reason: reason.to_string(), help: Vec::new() }
}

fn refused(refusal: &Refusal) -> Answer {
    match refusal {
        Refusal::Busy(seen) => {
            busy(&seen.observed).unwrap_or_else(|| Answer::Busy { what: seen.what(), attempt: None })
        }
        Refusal::NotPermitted(problem) => rejected(&problem.what),
        Refusal::Refused(problems) => {
            let help = problems.iter().map(|problem| problem.help.clone()).collect();
            Answer::Rejected { reason: refusal.to_string(), help }
        }
    }
}

fn refuse(connection: UnixStream, answer: &Answer) {
    let what = serde_json::to_string(answer).unwrap_or_default();
    let taken = door::answer(connection, answer)
        .map_or_else(|e| format!(" (nobody took it: {e})"), |()| String::new());
    tracing::info!("refused: {}{taken}", what.chars().take(300).collect::<String>());
}
