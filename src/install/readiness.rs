//! Readiness: what was observed after activation. Looking and judging are two functions; the judge is pure.

pub(super) mod volumes;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use jiff::Timestamp;
use serde::Deserialize;

use super::installed::Inode;
use super::release::Version;
use super::units::{PLUGIN, SERVICE};
use crate::host::Host;
use crate::interrupt::Interrupt;
use crate::systemd::{Systemd, Unit};
use crate::text::printable_value;

/// Automatic restarts after which a service that was never ready counts as crashed.
const MOST_CRASHES: u32 = 3;
/// How long one answer of the Machine API may take.
const ANSWER: Duration = Duration::from_secs(2);
/// Between two looks before readiness; systemd is asked less often.
const LOOK: Duration = Duration::from_millis(10);
/// Between two looks while readiness is watched.
const WATCH: Duration = Duration::from_millis(500);
/// For how long a process that was ready may not answer.
const MISSING: Duration = Duration::from_secs(10);

/// What the Machine API says of itself.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub(crate) struct Answer {
    /// Its version.
    pub(crate) version: String,
    /// Its process.
    pub(crate) pid: u32,
    /// Whether it serves as it should.
    pub(crate) ready: bool,
    /// What keeps it from that.
    #[serde(default)]
    pub(crate) problems: Vec<String>,
}

/// Another long-running service of ours, at one moment.
#[derive(Debug, Clone)]
pub(crate) struct Service {
    unit: Unit,
    /// The executable that its main process runs.
    executable: Option<Inode>,
    /// Who answers, where it is the volume plugin and says so.
    plugin: Result<Option<volumes::Plugin>, String>,
}

/// What was seen of the daemon at one moment.
#[derive(Debug, Clone)]
pub(crate) struct Seen {
    /// What systemd says of the service.
    pub(crate) unit: Unit,
    /// The executable that the main process runs.
    pub(crate) executable: Option<Inode>,
    /// What every other process of the service runs.
    pub(crate) others: Vec<(u32, Inode)>,
    /// What the Machine API answered, or why it did not.
    pub(crate) answer: Result<Answer, String>,
    /// The other services.
    pub(crate) services: Vec<Service>,
    /// Volumes that were mounted before, are used, and are mounted no more.
    pub(crate) lost: Vec<String>,
}

/// What must be seen.
#[derive(Debug, Clone)]
pub(crate) struct Expected {
    /// The version that must answer.
    pub(crate) version: Version,
    /// The executable that must run.
    pub(crate) executable: Inode,
    /// The executable that was replaced, where it was: no process of the service may run it any more.
    pub(crate) replaced: Option<Inode>,
    /// Automatic restarts of the service before, so that only new ones count.
    pub(crate) restarts_before: u32,
    /// The process whose end was asked for: it answers until its job has run, and that means nothing.
    pub(crate) replaced_pid: Option<u32>,
    /// The other services that run the executable, and their automatic restarts before.
    pub(crate) services: Vec<(String, u32)>,
    /// The volumes that were mounted before.
    pub(crate) mounted: Vec<(String, String)>,
}

/// One service that runs as it should: its process, and the automatic restarts that it had.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Running {
    name: String,
    pid: u32,
    restarts: u32,
}

/// What that comes to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// The daemon (the first of these) is the target, and ready; every other service runs the same executable.
    Ready(Vec<Running>),
    /// It may still become ready.
    NotYet(String),
    /// It ends again and again, or systemd has given it up.
    Crashed(String),
    /// Something else answers.
    WrongVersion(String),
}

/// Looks once, at the daemon and at these other services.
pub(crate) fn look(host: &Host, systemd: Systemd, others_too: &[(String, u32)]) -> Result<Seen, String> {
    let names = std::iter::once(SERVICE).chain(others_too.iter().map(|(name, _)| name.as_str()));
    let names: Vec<&str> = names.collect();
    let mut shown = systemd.show(&names).map_err(|e| e.to_string())?;
    let runs = |unit: &Unit| match unit.main_pid {
        0 => None,
        pid => Inode::of(&PathBuf::from(format!("/proc/{pid}/exe"))).ok(),
    };
    let service = |(name, unit): (&&str, &Unit)| {
        let plugin = match *name == PLUGIN && unit.active == "active" {
            true => volumes::ask(host),
            false => Ok(None),
        };
        Service { executable: runs(unit), unit: unit.clone(), plugin }
    };
    let services = names[1..].iter().zip(&shown[1..]).map(service).collect();
    let unit = shown.remove(0);
    let executable = runs(&unit);
    // Connecting starts a daemon that is down; here that is what was just asked for, and in observers it is not done.
    let answer = if unit.active == "active" || unit.active == "activating" {
        ask(&host.api())
    } else {
        Err(format!("{SERVICE} is {}", unit.active))
    };
    let others = others(&unit);
    Ok(Seen { unit, executable, others, answer, services, lost: Vec::new() })
}

/// Looks at what is expected.
fn look_for(host: &Host, systemd: Systemd, expected: &Expected) -> Result<Seen, String> {
    let seen = look(host, systemd, &expected.services)?;
    Ok(Seen { lost: volumes::lost(host, &expected.mounted), ..seen })
}

/// The other processes in the control group of a service. Shells and followers that were started from it elsewhere are
/// none of its.
fn others(unit: &Unit) -> Vec<(u32, Inode)> {
    if unit.control_group.is_empty() {
        return Vec::new();
    }
    let processes =
        Path::new("/sys/fs/cgroup").join(unit.control_group.trim_start_matches('/')).join("cgroup.procs");
    let listed = std::fs::read_to_string(processes).unwrap_or_default();
    let others = listed.lines().filter_map(|pid| pid.parse().ok()).filter(|pid| *pid != unit.main_pid);
    others.filter_map(|pid| Some((pid, Inode::of(Path::new(&format!("/proc/{pid}/exe"))).ok()?))).collect()
}

/// Asks the Machine API who it is.
pub(crate) fn ask(api: &Path) -> Result<Answer, String> {
    let asked = crate::http::ask_blocking(api, hyper::Method::GET, "/v1/machine", None, ANSWER);
    let (status, body) = asked.map_err(|e| e.to_string())?;
    if status != 200 {
        return Err(format!("the Machine API answered {status}"));
    }
    let not_understood = |e| format!("the Machine API's answer is not understood: {e}");
    let mut answer: serde_json::Value = serde_json::from_slice(&body).map_err(not_understood)?;
    printable_value(&mut answer);
    serde_json::from_value(answer).map_err(not_understood)
}

/// Judges one look.
pub(crate) fn judge(expected: &Expected, seen: &Seen) -> Verdict {
    let unit = &seen.unit;
    if let Some(verdict) = not_running(SERVICE, unit, expected.restarts_before) {
        return verdict;
    }
    if expected.replaced_pid == Some(unit.main_pid) {
        return Verdict::NotYet(format!("process {} has not been restarted yet", unit.main_pid));
    }
    if seen.executable != Some(expected.executable) {
        return Verdict::NotYet(format!("process {} does not run the installed executable", unit.main_pid));
    }
    let stale = |(_, runs): &&(u32, Inode)| Some(*runs) == expected.replaced;
    if let Some((pid, _)) = seen.others.iter().find(stale) {
        return Verdict::NotYet(format!("process {pid} of {SERVICE} still runs the replaced executable"));
    }
    let answer = match &seen.answer {
        Ok(answer) => answer,
        Err(why) => return Verdict::NotYet(why.clone()),
    };
    if answer.pid != unit.main_pid {
        return Verdict::NotYet(format!(
            "process {} answers, and {SERVICE} is process {}",
            answer.pid, unit.main_pid
        ));
    }
    if answer.version != expected.version.to_string() {
        return Verdict::WrongVersion(format!("{} answers, not {}", answer.version, expected.version));
    }
    if !answer.ready {
        return Verdict::NotYet(format!("it is not ready: {}", answer.problems.join("; ")));
    }
    let mut running = vec![Running { name: SERVICE.into(), pid: answer.pid, restarts: unit.restarts }];
    for ((name, restarts_before), service) in expected.services.iter().zip(&seen.services) {
        if let Some(verdict) = not_running(name, &service.unit, *restarts_before) {
            return verdict;
        }
        let pid = service.unit.main_pid;
        if service.executable != Some(expected.executable) {
            return Verdict::NotYet(format!("process {pid} of {name} does not run the installed executable"));
        }
        match &service.plugin {
            Err(why) => return Verdict::NotYet(why.clone()),
            Ok(Some(plugin)) if plugin.pid != pid => {
                let answers = plugin.pid;
                return Verdict::NotYet(format!(
                    "process {answers} serves volumes, and {name} is process {pid}"
                ));
            }
            Ok(Some(plugin)) if plugin.version != expected.version.to_string() => {
                let (is, not) = (&plugin.version, expected.version);
                return Verdict::WrongVersion(format!("{is} serves volumes, not {not}"));
            }
            Ok(_) => {}
        }
        running.push(Running { name: name.clone(), pid, restarts: service.unit.restarts });
    }
    match seen.lost.as_slice() {
        [] => Verdict::Ready(running),
        lost => Verdict::NotYet(format!("in use, and mounted no more: volume {}", lost.join(", "))),
    }
}

/// Why a service does not run, if it does not.
fn not_running(name: &str, unit: &Unit, restarts_before: u32) -> Option<Verdict> {
    let crashes = unit.restarts.saturating_sub(restarts_before);
    if unit.active == "failed" {
        let (ended, result) = (ended(unit), &unit.result);
        return Some(Verdict::Crashed(format!(
            "{name} {ended} and systemd does not start it again ({result})"
        )));
    }
    // While it is being started again nothing is known of how it ended: the next look tells.
    if crashes >= MOST_CRASHES && has_ended(unit) {
        return Some(Verdict::Crashed(format!("{name} {}, {crashes} times", ended(unit))));
    }
    if unit.active == "active" {
        return None;
    }
    let text = if has_ended(unit) && (crashes > 0 || restarts_by_itself(unit)) {
        format!("{name} {}, and is {}", ended(unit), unit.active)
    } else {
        format!("{name} is {} ({})", unit.active, unit.sub)
    };
    Some(Verdict::NotYet(text))
}

/// Whether systemd waits before it starts a service again that ended: nobody stopped it.
fn restarts_by_itself(unit: &Unit) -> bool {
    unit.sub.starts_with("auto-restart")
}

/// Whether it is known how the last main process ended.
fn has_ended(unit: &Unit) -> bool {
    matches!(unit.exit_code.as_str(), "1" | "2" | "3") || !matches!(unit.result.as_str(), "" | "success")
}

/// How the last main process of a service ended.
fn ended(unit: &Unit) -> String {
    match (unit.exit_code.as_str(), unit.result.as_str()) {
        // Killed by systemd, which waited for READY=1 in vain.
        (_, "timeout") => "did not become ready within its start timeout".into(),
        ("1", _) => format!("exited with status {}", unit.exit_status),
        ("2" | "3", _) => format!("was killed by signal {}", unit.exit_status),
        (_, result) => format!("ended ({result})"),
    }
}

/// The target was observed to run, ready, and to stay so.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Confirmed {
    /// Its process.
    pub(crate) pid: u32,
}

/// The reason of a flow that was asked to end and did: nobody failed.
pub(crate) const INTERRUPTED: &str = "interrupted";

/// Why it was not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NotConfirmed {
    /// `not_ready`, `crashed`, `wrong_version`, `unstable`, `unknown`, `interrupted`.
    pub(crate) reason: &'static str,
    /// What was observed.
    pub(crate) observed: String,
}

/// Looks until it is ready, to a deadline; then watches that it stays so for the window. `first` is told of the first
/// complete observation, `warn` of what is worth knowing.
#[allow(clippy::too_many_arguments, reason = "what is looked at, for how long, and who is told")]
pub(crate) fn confirm(
    host: &Host,
    systemd: Systemd,
    expected: &Expected,
    deadline: Duration,
    window: Duration,
    interrupt: &Interrupt,
    first: &mut dyn FnMut(u32, Timestamp),
    warn: &mut dyn FnMut(String),
) -> Result<Confirmed, NotConfirmed> {
    let began = Instant::now();
    let mut running = first_ready(host, systemd, expected, deadline, interrupt)?;
    first(running[0].pid, Timestamp::now());
    let mut watched = Instant::now();
    // One late answer of the same process is not yet instability; it must have answered at the end.
    let mut missed: Option<(Instant, String)> = None;
    loop {
        let pid = running[0].pid;
        let left = window.saturating_sub(watched.elapsed());
        match &missed {
            None if left.is_zero() => return Ok(Confirmed { pid }),
            Some((since, why)) if since.elapsed() >= MISSING => {
                let observed = format!("process {pid} was ready, and for {} s now: {why}", MISSING.as_secs());
                return Err(NotConfirmed { reason: "unstable", observed });
            }
            _ => std::thread::sleep(if left.is_zero() { WATCH } else { left.min(WATCH) }),
        }
        not_terminated(interrupt)?;
        let seen = match look_for(host, systemd, expected) {
            Ok(seen) => seen,
            Err(e) => {
                missed.get_or_insert_with(|| (Instant::now(), unknown(e).observed));
                continue;
            }
        };
        match judge(expected, &seen) {
            Verdict::Ready(now) if now == running => missed = None,
            Verdict::Ready(now) => {
                let another = changed(&running, &now);
                // A start on request resets the count of automatic ones: who ended by itself has one more.
                if another.by_itself || began.elapsed() >= deadline {
                    return Err(NotConfirmed { reason: "unstable", observed: another.observed });
                }
                warn(format!("{}: somebody restarted it, and it is watched anew", another.observed));
                (running, watched, missed) = (now, Instant::now(), None);
            }
            // Somebody may be restarting it; a process that ended by itself is a failure at once.
            Verdict::NotYet(why) if !ended_by_itself(&running, &seen) => {
                missed.get_or_insert((Instant::now(), why));
            }
            Verdict::NotYet(why) | Verdict::Crashed(why) | Verdict::WrongVersion(why) => {
                let after = watched.elapsed().as_secs_f32();
                let observed = format!("process {pid} was ready, and {after:.1} s later: {why}");
                return Err(NotConfirmed { reason: "unstable", observed });
            }
        }
    }
}

/// Another process than the one that was watched.
struct Another {
    observed: String,
    by_itself: bool,
}

fn changed(before: &[Running], now: &[Running]) -> Another {
    let pairs = before.iter().zip(now).filter(|(before, now)| before != now);
    let texts = pairs.clone().map(|(before, now)| {
        let (name, old, new) = (&now.name, before.pid, now.pid);
        format!("process {old} of {name} was ready and is gone; process {new} runs now")
    });
    Another {
        observed: texts.collect::<Vec<_>>().join("; "),
        by_itself: pairs.into_iter().any(|(before, now)| now.restarts > before.restarts),
    }
}

/// Whether a service that was running ended, and nobody had asked for that.
fn ended_by_itself(before: &[Running], seen: &Seen) -> bool {
    let units = std::iter::once(&seen.unit).chain(seen.services.iter().map(|service| &service.unit));
    before.iter().zip(units).any(|(before, unit)| {
        restarts_by_itself(unit) || unit.restarts > before.restarts || unit.active == "failed"
    })
}

fn first_ready(
    host: &Host,
    systemd: Systemd,
    expected: &Expected,
    deadline: Duration,
    interrupt: &Interrupt,
) -> Result<Vec<Running>, NotConfirmed> {
    let started = Instant::now();
    let mut expected = expected.clone();
    loop {
        not_terminated(interrupt)?;
        let seen = match look_for(host, systemd, &expected) {
            Ok(seen) => seen,
            Err(_) if started.elapsed() < deadline => {
                std::thread::sleep(WATCH);
                continue;
            }
            Err(e) => return Err(unknown(e)),
        };
        // A start on request counts anew; until its job has run, the old count is still there.
        expected.restarts_before = expected.restarts_before.min(seen.unit.restarts);
        for ((_, before), service) in expected.services.iter_mut().zip(&seen.services) {
            *before = (*before).min(service.unit.restarts);
        }
        let verdict = judge(&expected, &seen);
        let late = started.elapsed() >= deadline;
        match verdict {
            Verdict::Ready(running) => return Ok(running),
            Verdict::Crashed(observed) => return Err(NotConfirmed { reason: "crashed", observed }),
            Verdict::WrongVersion(observed) if late => {
                return Err(NotConfirmed { reason: "wrong_version", observed });
            }
            Verdict::NotYet(observed) if late => {
                let observed = format!("not ready within {} s: {observed}", deadline.as_secs());
                return Err(NotConfirmed { reason: "not_ready", observed });
            }
            Verdict::WrongVersion(_) | Verdict::NotYet(_) => std::thread::sleep(LOOK),
        }
    }
}

fn not_terminated(interrupt: &Interrupt) -> Result<(), NotConfirmed> {
    if interrupt.terminated() {
        return Err(NotConfirmed {
            reason: INTERRUPTED,
            observed: "SIGTERM came before readiness was confirmed".into(),
        });
    }
    Ok(())
}

fn unknown(why: impl std::fmt::Display) -> NotConfirmed {
    NotConfirmed { reason: "unknown", observed: format!("systemd can't be asked: {why}") }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn the_verdict_is_a_table() {
        let own = Inode::of(Path::new("/proc/self/exe")).unwrap();
        let other = Inode::of(Path::new("/proc/self/status")).unwrap();
        let expected = Expected {
            version: "1.5.0".parse().unwrap(),
            executable: own,
            replaced: Some(other),
            restarts_before: 4,
            replaced_pid: Some(6),
            services: Vec::new(),
            mounted: Vec::new(),
        };
        let unit = |active: &str, restarts| Unit {
            active: active.into(),
            main_pid: 7,
            restarts,
            exit_code: "1".into(),
            exit_status: "42".into(),
            result: "exit-code".into(),
            ..Unit::default()
        };
        let answer = |version: &str, pid, ready| {
            Ok(Answer { version: version.into(), pid, ready, problems: vec!["the disk is full".into()] })
        };
        let silent = || Err("refused".to_owned());
        let seen = |unit, executable, answer| Seen {
            unit,
            executable,
            others: vec![(9, own)],
            answer,
            services: Vec::new(),
            lost: Vec::new(),
        };
        let left = |seen: Seen| Seen { others: vec![(9, own), (11, other)], ..seen };
        let verdict = |seen: Seen| match judge(&expected, &seen) {
            Verdict::Ready(_) => "ready".to_owned(),
            Verdict::NotYet(why) => format!("not yet: {why}"),
            Verdict::Crashed(why) => format!("crashed: {why}"),
            Verdict::WrongVersion(why) => format!("wrong: {why}"),
        };
        let good = answer("1.5.0", 7, true);
        for (seen, expected) in [
            (seen(unit("active", 4), Some(own), good.clone()), "ready"),
            (seen(unit("active", 6), Some(own), good.clone()), "ready"),
            (
                left(seen(unit("active", 4), Some(own), good.clone())),
                "not yet: process 11 of ployz.service still runs",
            ),
            (
                seen(Unit { main_pid: 6, ..unit("active", 4) }, Some(own), good.clone()),
                "not yet: process 6 has not been",
            ),
            (seen(unit("active", 4), Some(other), good.clone()), "not yet: process 7 does not run"),
            (seen(unit("active", 4), None, good.clone()), "not yet: process 7 does not run"),
            (seen(unit("active", 4), Some(own), silent()), "not yet: refused"),
            (seen(unit("active", 4), Some(own), answer("1.5.0", 8, true)), "not yet: process 8 answers"),
            (seen(unit("active", 4), Some(own), answer("1.4.0", 7, true)), "wrong: 1.4.0 answers"),
            (
                seen(unit("active", 4), Some(own), answer("1.5.0", 7, false)),
                "not yet: it is not ready: the disk",
            ),
            (
                Seen { lost: vec!["data".into()], ..seen(unit("active", 4), Some(own), good.clone()) },
                "not yet: in use, and mounted no more: volume data",
            ),
            (seen(unit("activating", 4), None, silent()), "not yet: ployz.service is activating"),
            (seen(unit("activating", 5), None, silent()), "not yet: ployz.service exited with status 42"),
            (
                seen(unit("activating", 7), None, silent()),
                "crashed: ployz.service exited with status 42, 3 times",
            ),
            (seen(unit("failed", 4), None, silent()), "crashed: ployz.service exited with status 42 and"),
            (seen(unit("inactive", 4), None, silent()), "not yet: ployz.service is inactive"),
        ] {
            let verdict = verdict(seen);
            assert!(verdict.starts_with(expected), "{verdict} / {expected}");
        }
    }
}
