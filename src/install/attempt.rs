//! The record of an attempt: what was asked, how far it came, what is installed now, and how it ended.
//!
//! Written whole and atomically at each stage by whoever holds admission; read tolerantly by everyone else. Readers
//! derive the state, they never write it.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::admission::{Admission, Observed};
use super::release::{Channel, Version};
use super::staging::SCOPE_PREFIX;
use crate::durable::{move_aside, read_bounded, sync_parent, write_whole};
use crate::host::{Account, Host};

/// The schema of the records that this release writes.
const SCHEMA: u32 = 1;
/// How many records are kept.
const KEPT: usize = 32;
const MOST_RECORD: usize = 256 * 1024;

/// How far an attempt has come. A stage of another release's making is shown as it is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", from = "String")]
pub enum Stage {
    /// The record is durable; nothing was done yet.
    Accepted,
    /// Accounts and directories.
    Preparing,
    /// Fetching.
    Acquiring,
    /// Comparing checksums.
    Verifying,
    /// Extracting, and running the new binary before anything is replaced.
    Preflight,
    /// Renaming.
    Activating,
    /// Restarting what runs a replaced executable.
    Restarting,
    /// Observing that it runs.
    Confirming,
    /// One that this release does not know.
    Other(String),
}

const STAGES: [(Stage, &str); 8] = [
    (Stage::Accepted, "accepted"),
    (Stage::Preparing, "preparing"),
    (Stage::Acquiring, "acquiring"),
    (Stage::Verifying, "verifying"),
    (Stage::Preflight, "preflight"),
    (Stage::Activating, "activating"),
    (Stage::Restarting, "restarting"),
    (Stage::Confirming, "confirming"),
];

impl From<String> for Stage {
    fn from(text: String) -> Self {
        STAGES.iter().find(|(_, name)| *name == text).map_or(Self::Other(text), |(stage, _)| stage.clone())
    }
}

impl From<Stage> for String {
    fn from(stage: Stage) -> Self {
        stage.to_string()
    }
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Other(text) => f.write_str(text),
            known => {
                f.write_str(STAGES.iter().find(|(stage, _)| stage == known).map_or("", |(_, name)| name))
            }
        }
    }
}

/// What was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Requested {
    /// This version.
    Exact(Version),
    /// What a channel pointed to, when it was resolved.
    Channel(Channel),
    /// The executable that was run.
    Itself,
}

/// Whether the installation was changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Installation {
    /// Nothing was.
    Unchanged,
    /// At least one file was switched.
    Replaced,
}

/// How an attempt ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// The target was observed to run, ready, and to stay so.
    Succeeded {
        /// The version that answered.
        version: Version,
        /// The process that answered.
        pid: u32,
        /// The digest of the installed executable.
        sha256: String,
        /// Whether the target was running already, so that nothing was replaced or restarted.
        nothing_was_needed: bool,
    },
    /// Everything is in place and nothing was started, as asked (`--installation-only`).
    Installed {
        /// The version in place.
        version: Version,
        /// The digest of the installed executable.
        sha256: String,
    },
    /// It did not work.
    Failed {
        /// Where.
        stage: Stage,
        /// A stable word for programs.
        reason: String,
        /// What was observed.
        error: String,
        /// What lies behind it, outermost first.
        causes: Vec<String>,
        /// What to do next, a line each.
        #[serde(default)]
        help: Vec<String>,
    },
    /// It ended before it had an outcome.
    Interrupted {
        /// Where.
        stage: Stage,
        /// How that is known.
        evidence: String,
    },
}

/// The record of one attempt.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// Of the format.
    pub schema: u32,
    /// 32 hex digits.
    pub id: String,
    /// Grows with every attempt, whatever the clock does.
    #[serde(default)]
    pub sequence: u64,
    /// `install`, `upgrade`, `recover`.
    pub kind: String,
    /// What was asked for.
    pub requested: Requested,
    /// The exact release that it is about, once known.
    pub target: Option<Version>,
    /// The digest of the target's executable, known before the first rename.
    pub target_digest: Option<String>,
    /// What was installed before.
    pub from: Option<Version>,
    /// The digest of the executable that was in place before, if there was one.
    #[serde(default)]
    pub from_digest: Option<String>,
    /// How far it has come.
    pub stage: Stage,
    /// Whether the installation was changed.
    pub installation: Installation,
    /// The files that were switched, in order.
    #[serde(default)]
    pub switched: Vec<String>,
    /// The first complete observation of readiness.
    pub ready_observed_at: Option<Timestamp>,
    /// How it ended, if it has.
    pub outcome: Option<Outcome>,
    /// What is worth knowing and no failure.
    #[serde(default)]
    pub warnings: Vec<String>,
    /// The unit that did it, if one did.
    pub unit: Option<String>,
    /// systemd's id of that unit's run.
    pub invocation_id: Option<String>,
    /// The boot in which it was accepted.
    pub boot_id: String,
    /// When it was accepted.
    pub accepted_at: Timestamp,
    /// When this record was last written.
    pub updated_at: Timestamp,
    /// When the outcome was written.
    pub ended_at: Option<Timestamp>,
    /// The command that shows its whole story.
    pub diagnostics: String,
}

/// The state of an attempt, as a reader derives it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum State {
    /// It has an outcome.
    Ended,
    /// It holds admission.
    Running,
    /// It has no outcome and runs no more.
    Interrupted {
        /// How that is known.
        evidence: String,
    },
    /// This reader can't see.
    Unknown {
        /// Why.
        why: String,
    },
}

/// What is in one file of the attempts' directory.
#[derive(Debug, Clone, PartialEq)]
pub enum Entry {
    /// A record.
    Record(Box<Record>),
    /// A record with something that this release does not know: shown as it is.
    Newer(Map<String, Value>),
}

/// Why an attempt's file can't be shown.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// It can't be read.
    #[error("reading {path:?}: {source}")]
    Read {
        /// The file.
        path: std::path::PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// It is not a record.
    #[error("{path:?} is not a record: {problem}")]
    Damaged {
        /// The file.
        path: std::path::PathBuf,
        /// What is wrong with it.
        problem: String,
    },
}

/// Whether a text is an attempt's id: 32 lower-case hex digits.
pub fn is_id(text: &str) -> bool {
    text.len() == 32 && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
}

impl Record {
    /// The record of an attempt that is accepted now.
    pub(crate) fn new(
        host: &Host,
        id: &str,
        kind: &str,
        requested: Requested,
        target: Option<Version>,
    ) -> Self {
        let now = Timestamp::now();
        Self {
            schema: SCHEMA,
            id: id.to_owned(),
            sequence: newest_sequence(host) + 1,
            kind: kind.to_owned(),
            requested,
            target,
            target_digest: None,
            from: None,
            from_digest: None,
            stage: Stage::Accepted,
            installation: Installation::Unchanged,
            switched: Vec::new(),
            ready_observed_at: None,
            outcome: None,
            warnings: Vec::new(),
            unit: own_unit(),
            invocation_id: std::env::var("INVOCATION_ID").ok().filter(|id| is_id(id)),
            boot_id: host.boot_id(),
            accepted_at: now,
            updated_at: now,
            ended_at: None,
            diagnostics: format!("journalctl _UID=0 PLOYZ_ATTEMPT={id}"),
        }
    }

    /// Writes it whole. Only the holder of admission may.
    pub(crate) fn write(&mut self, host: &Host, _admission: &Admission) -> io::Result<()> {
        self.updated_at = Timestamp::now();
        let mut text = serde_json::to_vec_pretty(self).map_err(io::Error::other)?;
        text.push(b'\n');
        let owner = Account { uid: 0, gid: host.group("ployz").unwrap_or(0) };
        write_whole(host, &record_path(host, &self.id), &text, 0o640, owner)
    }

    /// What an attempt without an outcome did to the installation, from the digest of what is in place now: it may have
    /// been cut off after a rename and before it wrote so.
    pub fn installation_now(&self, in_place: Option<&str>) -> Installation {
        let target = self.target_digest.as_deref();
        let switched = target.is_some() && target == in_place && self.from_digest.as_deref() != target;
        if self.outcome.is_none() && switched { Installation::Replaced } else { self.installation }
    }

    /// The state, from the record, this boot's id and what is seen of admission.
    pub fn state(&self, boot_id: &str, admission: &Observed, exit: Option<&str>) -> State {
        if self.outcome.is_some() {
            return State::Ended;
        }
        if self.boot_id != boot_id {
            let evidence =
                format!("the Machine was restarted (boot {} → {})", short(&self.boot_id), short(boot_id));
            return State::Interrupted { evidence };
        }
        let evidence = || exit.map_or_else(|| "none: it ended without a word".to_owned(), str::to_owned);
        match admission {
            Observed::Installing { holder: Some(holder) } if holder.attempt == self.id => State::Running,
            Observed::Unknown { why } => State::Unknown { why: why.clone() },
            // The lock is held, and by whom is not readable for a moment or for us: it may well be this one.
            Observed::Installing { holder: None } => {
                State::Unknown { why: "who installs can't be read".into() }
            }
            _ => State::Interrupted { evidence: evidence() },
        }
    }
}

fn short(id: &str) -> &str {
    id.get(..4).unwrap_or(id)
}

/// The unit of ours whose cgroup this process is in: the scope of an installer, the service of a worker.
pub(crate) fn own_unit() -> Option<String> {
    let text = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    let path = text.lines().find_map(|line| line.strip_prefix("0::"))?;
    let ours = |part: &&str| {
        let scope = part.strip_prefix(SCOPE_PREFIX).and_then(|rest| rest.strip_suffix(".scope"));
        scope.is_some_and(|id| id.len() == 8 && id.bytes().all(|b| b.is_ascii_hexdigit()))
            || part.starts_with("ployz-upgrade@")
    };
    path.rsplit('/').find(ours).map(str::to_owned)
}

/// Reads one record. An unknown field or stage stops nothing, nor does a newer schema.
///
/// # Errors
/// When it can't be read or is no record at all.
pub fn read(path: &Path) -> Result<Entry, ReadError> {
    let text = read_bounded(path, MOST_RECORD)
        .map_err(|source| ReadError::Read { path: path.to_owned(), source })?;
    parse(&text).map_err(|problem| ReadError::Damaged { path: path.to_owned(), problem })
}

fn parse(text: &[u8]) -> Result<Entry, String> {
    let value: Map<String, Value> = serde_json::from_slice(text).map_err(|e| e.to_string())?;
    let schema = value.get("schema").and_then(Value::as_u64).ok_or("it has no schema")?;
    if schema > u64::from(SCHEMA) {
        return Ok(Entry::Newer(value));
    }
    match serde_json::from_value(Value::Object(value.clone())) {
        Ok(record) => Ok(Entry::Record(Box::new(record))),
        // A record all the same, with something in it that this release does not know.
        Err(_) if value.get("id").and_then(Value::as_str).is_some_and(is_id) => Ok(Entry::Newer(value)),
        Err(e) => Err(e.to_string()),
    }
}

/// The highest sequence number of any record here.
fn newest_sequence(host: &Host) -> u64 {
    match all(host).unwrap_or_default().into_iter().next() {
        Some((_, Ok(Entry::Record(record)))) => record.sequence,
        _ => 0,
    }
}

/// What the unit of an attempt left as evidence when it ended, if it did.
pub fn exit_evidence(host: &Host, id: &str) -> Option<String> {
    let text = read_bounded(&exit_path(host, id), 4096).ok()?;
    let value: Map<String, Value> = serde_json::from_slice(&text).ok()?;
    let field = |name: &str| value.get(name).and_then(Value::as_str).unwrap_or("?").to_owned();
    Some(format!(
        "its unit ended: {} {} {}",
        field("service_result"),
        field("exit_code"),
        field("exit_status")
    ))
}

/// Where the record of an attempt is.
fn record_path(host: &Host, id: &str) -> PathBuf {
    host.attempts().join(format!("{id}.json"))
}

/// Where the evidence that its unit leaves is.
fn exit_path(host: &Host, id: &str) -> PathBuf {
    host.attempts().join(format!("{id}.exit.json"))
}

/// Every attempt that has a record, and what is in it, newest first; each file is read once.
fn all(host: &Host) -> io::Result<Vec<(String, Result<Entry, ReadError>)>> {
    let mut found = Vec::new();
    let entries = match std::fs::read_dir(host.attempts()) {
        Ok(entries) => entries,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(e),
    };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let Some(id) = name.to_str().and_then(|n| n.strip_suffix(".json")).filter(|id| is_id(id)) else {
            continue;
        };
        let content = read(&entry.path());
        // Where a record can't be read, its file's time has to do.
        let order = match &content {
            Ok(Entry::Record(record)) => (record.sequence, record.accepted_at),
            _ => {
                let modified = entry.metadata().and_then(|meta| meta.modified()).ok();
                (0, modified.and_then(|time| time.try_into().ok()).unwrap_or_default())
            }
        };
        found.push((order, id.to_owned(), content));
    }
    found.sort_by(|a, b| (b.0, &b.1).cmp(&(a.0, &a.1)));
    Ok(found.into_iter().map(|(_, id, content)| (id, content)).collect())
}

/// The ids of the attempts that have a record, newest first.
///
/// # Errors
/// When the directory can't be read; one that is not there is empty.
pub fn ids(host: &Host) -> io::Result<Vec<String>> {
    Ok(all(host)?.into_iter().map(|(id, _)| id).collect())
}

/// The newest record that can be read, with its derived state; `in_place` is the digest of the installed executable.
///
/// # Errors
/// When the directory or the file can't be read.
pub fn latest(
    host: &Host,
    admission: &Observed,
    in_place: Option<&str>,
) -> Result<Option<(Entry, State)>, ReadError> {
    let all = all(host).map_err(|source| ReadError::Read { path: host.attempts(), source })?;
    let Some((id, content)) = all.into_iter().next() else { return Ok(None) };
    let mut entry = content?;
    let state = match &mut entry {
        Entry::Record(record) => {
            record.installation = record.installation_now(in_place);
            let exit = exit_evidence(host, &id);
            record.state(&host.boot_id(), admission, exit.as_deref())
        }
        Entry::Newer(_) => State::Unknown { why: "written by another release".into() },
    };
    Ok(Some((entry, state)))
}

/// Closes every open record as interrupted, moves damaged ones aside, and forgets all but the newest. Returns what is
/// worth telling.
pub(crate) fn close_open(host: &Host, admission: &Admission, in_place: Option<&str>) -> Vec<String> {
    let mut told = Vec::new();
    let boot_id = host.boot_id();
    let mut others = all(host).unwrap_or_default();
    others.retain(|(id, _)| id != admission.attempt());
    // This one's own record comes next.
    let forgotten: Vec<String> = others.iter().skip(KEPT - 1).map(|(id, _)| id.clone()).collect();
    for (id, content) in others {
        let path = record_path(host, &id);
        match content {
            Ok(Entry::Record(mut record)) if record.outcome.is_none() => {
                let exit = exit_evidence(host, &id);
                // Admission is ours, so nobody else runs.
                let State::Interrupted { evidence } =
                    record.state(&boot_id, &Observed::Free, exit.as_deref())
                else {
                    continue;
                };
                told.push(format!("attempt {id} was interrupted at {}: {evidence}", record.stage));
                record.installation = record.installation_now(in_place);
                record.outcome = Some(Outcome::Interrupted { stage: record.stage.clone(), evidence });
                record.ended_at = Some(Timestamp::now());
                if let Err(e) = record.write(host, admission) {
                    told.push(format!("the record of attempt {id} could not be closed: {e}"));
                }
            }
            Err(ReadError::Damaged { problem, .. }) => match move_aside(&path) {
                Ok(aside) => told.push(format!("a damaged record was moved aside to {aside:?}: {problem}")),
                Err(e) => told.push(format!("a damaged record, {path:?}, could not be moved aside: {e}")),
            },
            _ => {}
        }
    }
    for id in &forgotten {
        let _ = std::fs::remove_file(record_path(host, id));
        let _ = std::fs::remove_file(exit_path(host, id));
    }
    let _ = sync_parent(&host.attempts().join("any"));
    told
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]
    use super::super::admission::Holder;
    use super::*;

    fn record() -> Record {
        let host = Host::under(Path::new("/nonexistent"), Path::new("/nonexistent"));
        Record::new(&host, &"0a".repeat(16), "install", Requested::Itself, None)
    }

    fn holder(attempt: &str) -> Observed {
        let holder =
            Holder { attempt: attempt.into(), kind: "install".into(), pid: 1, since: Timestamp::UNIX_EPOCH };
        Observed::Installing { holder: Some(holder) }
    }

    #[test]
    fn the_state_is_derived_in_order() {
        let open = record();
        let mut ended = record();
        ended.outcome = Some(Outcome::Interrupted { stage: Stage::Acquiring, evidence: "x".into() });
        let own = open.boot_id.as_str();
        let interrupted = |evidence: &str| State::Interrupted { evidence: evidence.into() };
        let restarted = format!("the Machine was restarted (boot {} → beef)", short(own));
        let unknown = Observed::Unknown { why: "permission denied".into() };
        let table = [
            ("an outcome decides", &ended, "beef", holder(&ended.id), None, State::Ended),
            ("another boot", &open, "beef", holder(&open.id), None, interrupted(&restarted)),
            ("it holds the lock", &open, own, holder(&open.id), None, State::Running),
            (
                "another holds it",
                &open,
                own,
                holder("ff"),
                None,
                interrupted("none: it ended without a word"),
            ),
            ("nobody holds it", &open, own, Observed::Free, Some("killed"), interrupted("killed")),
            (
                "a mutation",
                &open,
                own,
                Observed::Mutating,
                None,
                interrupted("none: it ended without a word"),
            ),
            (
                "not allowed to look",
                &open,
                own,
                unknown,
                None,
                State::Unknown { why: "permission denied".into() },
            ),
        ];
        for (name, record, boot, admission, exit, expected) in table {
            assert_eq!(record.state(boot, &admission, exit), expected, "{name}");
        }
    }

    #[test]
    fn every_record_ever_written_is_read() {
        for entry in std::fs::read_dir("tests/fixtures/records").unwrap() {
            let path = entry.unwrap().path();
            read(&path).unwrap_or_else(|e| panic!("{e}"));
        }
    }

    #[test]
    fn a_newer_or_odd_record_is_read_tolerantly() {
        let mut value = serde_json::to_value(record()).unwrap();
        value["stage"] = "levitating".into();
        value["colour"] = "green".into();
        let Entry::Record(read) = parse(value.to_string().as_bytes()).unwrap() else {
            panic!("not a record")
        };
        assert_eq!(read.stage, Stage::Other("levitating".into()));
        value["schema"] = 7.into();
        assert!(matches!(parse(value.to_string().as_bytes()), Ok(Entry::Newer(_))));
        for damaged in ["", "{", "[]", "{}", r#"{"schema":1}"#, "\0\0\0\0"] {
            assert!(parse(damaged.as_bytes()).is_err(), "{damaged:?}");
        }
    }
}
