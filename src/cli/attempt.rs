//! `ployzd attempt`: what is recorded of an attempt, from the daemon, or from the records themselves where it is silent.

use std::io;
use std::time::Duration;

use hyper::Method;
use jiff::Timestamp;
use serde_json::{Value, json};

use super::Exit;
use super::output::{self, Output, Style, error};
use super::ployzd::Attempt;
use super::status::clock;
use super::upgrade;
use crate::host::Host;
use crate::http::ask_blocking;
use crate::install::admission;
use crate::install::attempt::{InPlace, State, is_id};
use crate::install::events::SCHEMA;
use crate::install::installed::on_disk;
use crate::install::records::{self, Seen, View};
use crate::install::status;

const DEADLINE: Duration = Duration::from_secs(5);

/// Shows an attempt, the list of them, or follows one to its end.
pub(crate) fn run(host: &Host, arguments: &Attempt) -> Exit {
    if let Some(id) = arguments.id.as_deref().filter(|id| !is_id(id)) {
        error(
            format!("{id:?} is not an attempt's id: 32 lower-case hex digits"),
            Some("list them: ployzd attempt --list"),
        );
        return Exit::Usage;
    }
    let which = arguments.id.as_deref().unwrap_or("latest");
    if arguments.list {
        return list(host, arguments.json);
    }
    let found = match get(host, which) {
        Ok(Some(seen)) => seen,
        Ok(None) => {
            let what = match &arguments.id {
                Some(id) => format!("no attempt {id} is recorded on this Machine"),
                None => "no attempt is recorded on this Machine".to_owned(),
            };
            error(what, Some("list them: ployzd attempt --list"));
            return Exit::Unchanged;
        }
        Err(e) => return unseen(&e),
    };
    if arguments.follow && matches!(found.state, State::Running) {
        return upgrade::follow_to_the_end(host, &found, arguments.json);
    }
    let mut out = output::stdout();
    let shown = if arguments.json { out.line(outcome_event(&found)) } else { show(&mut out, &found) };
    if shown.is_err() { Exit::Unknown } else { exit_of(&found) }
}

fn unseen(e: &str) -> Exit {
    let help = "ask as root: sudo /usr/local/bin/ployzd attempt";
    error(format!("what became of it is unknown: {e}"), Some(help));
    Exit::Unknown
}

/// One attempt, or the latest.
pub(crate) fn get(host: &Host, id: &str) -> Result<Option<Seen>, String> {
    let why = match from_api(host, &format!("/v1/upgrades/{id}")) {
        Ok((200, value)) => return serde_json::from_value(value).map(Some).map_err(|e| e.to_string()),
        Ok((404, _)) => return Ok(None),
        Ok((status, _)) => format!("the Machine API answered {status}"),
        Err(e) => e,
    };
    let seen = read(host, |view| match id {
        "latest" => records::latest(host, view),
        id => records::find(host, id, view),
    });
    seen.map_err(|e| format!("{why}; {e}"))
}

/// What the records say without the daemon.
pub(crate) fn read<T, E: ToString>(
    host: &Host,
    find: impl FnOnce(View<'_>) -> Result<T, E>,
) -> Result<T, String> {
    let in_place = on_disk(&host.installed()).ok().flatten().map(|(_, sha256)| sha256);
    let look = || admission::observe(host);
    find(View { admission: &look, in_place: in_place.as_deref() }).map_err(|e| e.to_string())
}

/// Asks the daemon, if there is one that runs: connecting would start one that was stopped.
fn from_api(host: &Host, uri: &str) -> Result<(u16, Value), String> {
    match status::look_at_process(host, None) {
        Ok(process) if process.state == "active" => {}
        Ok(process) => return Err(format!("the daemon is {}", process.state)),
        Err(e) => return Err(e),
    }
    let (status, body) =
        ask_blocking(&host.api(), Method::GET, uri, None, DEADLINE).map_err(|e| e.to_string())?;
    let value = serde_json::from_slice(&body).map_err(|e| format!("the Machine API's answer: {e}"))?;
    Ok((status, value))
}

fn list(host: &Host, json: bool) -> Exit {
    let told = from_api(host, "/v1/upgrades").ok().filter(|(status, _)| *status == 200);
    let told = told.and_then(|(_, mut value)| {
        serde_json::from_value::<Vec<Seen>>(value.get_mut("upgrades")?.take()).ok()
    });
    let found = match told {
        Some(found) => Ok(found),
        None => read(host, |view| records::history(host, view)),
    };
    let found = match found {
        Ok(found) => found,
        Err(e) => return unseen(&e),
    };
    let mut out = output::stdout();
    let shown = if json {
        out.line(json!({"schema": SCHEMA, "attempts": found}).to_string())
    } else if found.is_empty() {
        out.line("no attempt is recorded on this Machine")
    } else {
        found.iter().try_for_each(|seen| {
            let at = time(&seen.record, "accepted_at").map(clock).unwrap_or_default();
            out.line(format!("{}  {at}  {}  {}", text(&seen.record, "id"), what(&seen.record), how(seen)))
        })
    };
    if shown.is_err() { Exit::Unknown } else { Exit::Done }
}

/// "upgrade 1.4.0 → 1.5.0"
pub(crate) fn what(record: &Value) -> String {
    let from = record.get("from").and_then(Value::as_str).map(|from| format!("{from} → "));
    format!("{} {}{}", text(record, "kind"), from.unwrap_or_default(), text(record, "target"))
}

/// "failed at confirming, installation replaced"
fn how(seen: &Seen) -> String {
    let (stage, installation) = (text(&seen.record, "stage"), text(&seen.record, "installation"));
    match (&seen.state, outcome(&seen.record)) {
        (State::Running, _) => format!("running, at {stage}"),
        (State::Interrupted { .. }, _) => format!("INTERRUPTED at {stage}, installation {installation}"),
        (State::Unknown { why }, _) => format!("unknown: {why}"),
        (State::Ended, Some(("succeeded" | "installed", _))) => "succeeded".to_owned(),
        (State::Ended, Some((kind, detail))) => {
            let stage = detail.get("stage").and_then(Value::as_str).unwrap_or(stage);
            format!("{} at {stage}, installation {installation}", kind.to_uppercase())
        }
        (State::Ended, None) => "ended in a way that this release does not know".to_owned(),
    }
}

/// Everything that is known of an attempt, for people.
pub(crate) fn show(out: &mut Output<io::Stdout>, seen: &Seen) -> io::Result<()> {
    let record = &seen.record;
    out.line(format!("attempt {}  {}  {}", text(record, "id"), what(record), how(seen)))?;
    let at = |field| time(record, field).map(clock);
    if let Some(accepted) = at("accepted_at") {
        let ended = at("ended_at").map(|ended| format!(", ended {ended}")).unwrap_or_default();
        out.field("accepted", format!("{accepted}{ended}"))?;
    }
    if let Some(progress) = &seen.progress {
        out.field("acquiring", bytes(progress.bytes, progress.total))?;
    }
    if let Some(digest) = record.get("target_digest").and_then(Value::as_str) {
        out.field("target", format!("{}  {}", text(record, "target"), short(digest)))?;
    }
    let in_place = match seen.in_place {
        InPlace::Target => "the target",
        InPlace::Before => "what was there before",
        InPlace::Other => "neither the target nor what was there before",
        InPlace::Unknown => "unknown",
    };
    out.field("in place", in_place)?;
    let switched = record.get("switched").and_then(Value::as_array).into_iter().flatten();
    let switched: Vec<_> = switched.filter_map(Value::as_str).collect();
    if !switched.is_empty() {
        out.field("switched", switched.join(", "))?;
    }
    if let Some(ready) = at("ready_observed_at") {
        out.field("ready", ready)?;
    }
    match (&seen.state, outcome(record)) {
        (State::Interrupted { evidence }, _) => {
            out.field("evidence", evidence)?;
            out.help("see what is so now, then go on: ployzd status; sudo /usr/local/bin/ployzd install")?;
        }
        (_, Some(("interrupted", detail))) => {
            out.field("evidence", text(detail, "evidence"))?;
        }
        (_, Some(("failed", detail))) => {
            out.field("observed", out.styled(Style::Red, text(detail, "error")))?;
            for cause in strings(detail, "causes") {
                out.field("", cause)?;
            }
        }
        _ => {}
    }
    if let Some(ended) = &seen.unit_ended {
        out.field("unit", ended)?;
    }
    for warning in strings(record, "warnings") {
        out.line(format!("note: {warning}"))?;
    }
    if let Some((_, detail)) = outcome(record) {
        strings(detail, "help").try_for_each(|help| out.help(help))?;
    }
    out.help(&format!("the whole story: {}", text(record, "diagnostics")))
}

/// The last line of JSON.
pub(crate) fn outcome_event(seen: &Seen) -> String {
    let mut event = serde_json::to_value(seen).unwrap_or_default();
    event["schema"] = SCHEMA.into();
    event["event"] = "outcome".into();
    event["at"] = json!(Timestamp::now());
    event.to_string()
}

/// How an attempt ended, as a status; one that runs has not failed.
pub(crate) fn exit_of(seen: &Seen) -> Exit {
    let replaced = seen.record.get("installation").and_then(Value::as_str) == Some("replaced");
    match (&seen.state, outcome(&seen.record).map(|(kind, _)| kind)) {
        (State::Running, _) | (State::Ended, Some("succeeded" | "installed")) => Exit::Done,
        (State::Ended, Some("failed")) => {
            if replaced {
                Exit::Replaced
            } else {
                Exit::Unchanged
            }
        }
        _ => Exit::Unknown,
    }
}

/// The kind of an outcome, and what it says.
pub(crate) fn outcome(record: &Value) -> Option<(&str, &Value)> {
    let (kind, detail) = record.get("outcome")?.as_object()?.iter().next()?;
    Some((kind.as_str(), detail))
}

pub(crate) fn text<'a>(value: &'a Value, field: &str) -> &'a str {
    value.get(field).and_then(Value::as_str).unwrap_or("?")
}

pub(crate) fn time(value: &Value, field: &str) -> Option<Timestamp> {
    value.get(field)?.as_str()?.parse().ok()
}

fn strings<'a>(value: &'a Value, field: &str) -> impl Iterator<Item = &'a str> {
    value.get(field).and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str)
}

/// "3f9c…a2"
pub(crate) fn short(digest: &str) -> String {
    format!("{}…{}", digest.get(..4).unwrap_or_default(), digest.get(62..).unwrap_or_default())
}

/// "1.9 of 2.3 MB"
pub(crate) fn bytes(bytes: u64, total: Option<u64>) -> String {
    let mb = |bytes: u64| format!("{}.{}", bytes / 1_000_000, bytes / 100_000 % 10);
    match total {
        Some(total) => format!("{} of {} MB", mb(bytes), mb(total)),
        None => format!("{} MB", mb(bytes)),
    }
}
