//! The records of attempts, one file each: written whole and atomically at each stage by whoever holds admission, read
//! tolerantly by everyone else. Readers derive the state, they never write it.
//!
//! | file | what |
//! | --- | --- |
//! | `<id>.json` | the record |
//! | `<id>.exit.json` | how the unit of an attempt without an outcome ended, as systemd told it |
//! | `<id>.progress.json` | how many bytes have come; of no importance, and not durable |

use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::admission::{Admission, Observed};
use super::attempt::{InPlace, Outcome, Record, SCHEMA, State, is_id};
use crate::durable::{make_dir, move_aside, read_bounded, sync_parent, write_fleeting, write_whole};
use crate::host::{Account, Host};

/// How many records are kept.
const KEPT: usize = 32;
const MOST_RECORD: usize = 256 * 1024;

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

/// How many bytes of the archive have come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Progress {
    /// So many.
    pub bytes: u64,
    /// Of so many, if that is known.
    pub total: Option<u64>,
}

/// An attempt as a reader sees it at one moment.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Seen {
    /// Its record, as it is; what it did to the installation as the disk shows it.
    pub record: Value,
    /// Its derived state.
    #[serde(flatten)]
    pub state: State,
    /// Which executable is in place now.
    pub in_place: InPlace,
    /// How its unit ended, where systemd has said so and no outcome says more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unit_ended: Option<String>,
    /// While it acquires.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub progress: Option<Progress>,
}

impl Record {
    /// Writes it whole. Only the holder of admission may.
    pub(crate) fn write(&mut self, host: &Host, _admission: &Admission) -> io::Result<()> {
        self.updated_at = Timestamp::now();
        let mut text = serde_json::to_vec_pretty(self).map_err(io::Error::other)?;
        text.push(b'\n');
        let dir = host.attempts();
        if !dir.exists() {
            // Somebody removed it: what goes on is worth a record all the same.
            make_dir(&dir, 0o700)?;
            share(host)?;
        }
        write_whole(host, &record_path(host, &self.id), &text, 0o640, owner(host))
    }
}

/// Lets those who may use the Machine API read the records, once their group exists.
pub(super) fn share(host: &Host) -> io::Result<()> {
    let Some(gid) = host.group("ployz") else { return Ok(()) };
    let dir = std::fs::File::open(host.attempts())?;
    host.own(&dir, 0, gid)?;
    if host.privileged() {
        dir.set_permissions(std::fs::Permissions::from_mode(0o750))?;
    }
    Ok(())
}

/// Root's, and readable for whoever may use the Machine API.
fn owner(host: &Host) -> Account {
    Account { uid: 0, gid: host.group("ployz").unwrap_or(0) }
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
    match serde_json::from_value::<Record>(Value::Object(value.clone())) {
        // It is a file's name.
        Ok(record) if !is_id(&record.id) => Err("its id is none".into()),
        Ok(record) => Ok(Entry::Record(Box::new(record))),
        // A record all the same, with something in it that this release does not know.
        Err(_) if value.get("id").and_then(Value::as_str).is_some_and(is_id) => Ok(Entry::Newer(value)),
        Err(e) => Err(e.to_string()),
    }
}

/// The highest sequence number of any record here.
pub(super) fn newest_sequence(host: &Host) -> u64 {
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
        let content = match read(&entry.path()) {
            // To write it would be to write another file than this one.
            Ok(Entry::Record(record)) if record.id != id => {
                let problem = format!("it is that of attempt {}", record.id);
                Err(ReadError::Damaged { path: entry.path(), problem })
            }
            content => content,
        };
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

/// What a reader derives the state of an attempt from, besides its record.
#[derive(Clone, Copy)]
pub struct View<'a> {
    /// Looks at admission, when the record has been read: an attempt that was accepted after a look would seem to be
    /// interrupted.
    pub admission: &'a dyn Fn() -> Observed,
    /// The digest of the installed executable.
    pub in_place: Option<&'a str>,
}

/// The newest attempt.
///
/// # Errors
/// When the directory or the file can't be read.
pub fn latest(host: &Host, view: View<'_>) -> Result<Option<Seen>, ReadError> {
    let all = all(host).map_err(|source| ReadError::Read { path: host.attempts(), source })?;
    let newest = all.into_iter().next();
    newest.map(|(id, content)| Ok(seen(host, &id, content?, view))).transpose()
}

/// One attempt; `None` when there is no record of it.
///
/// # Errors
/// When its file can't be read.
pub fn find(host: &Host, id: &str, view: View<'_>) -> Result<Option<Seen>, ReadError> {
    Ok(entry(host, id)?.map(|entry| seen(host, id, entry, view)))
}

/// The record of an attempt, if there is one.
pub(crate) fn entry(host: &Host, id: &str) -> Result<Option<Entry>, ReadError> {
    if !is_id(id) {
        return Ok(None);
    }
    match read(&record_path(host, id)) {
        Ok(entry) => Ok(Some(entry)),
        Err(ReadError::Read { source, .. }) if source.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e),
    }
}

/// Every attempt that has a record that can be read, newest first: the bounded history.
///
/// # Errors
/// When the directory can't be read; one that is not there is empty.
pub fn history(host: &Host, view: View<'_>) -> io::Result<Vec<Seen>> {
    let readable = all(host)?.into_iter().filter_map(|(id, content)| Some((id, content.ok()?)));
    Ok(readable.map(|(id, entry)| seen(host, &id, entry, view)).collect())
}

fn seen(host: &Host, id: &str, entry: Entry, view: View<'_>) -> Seen {
    let mut record = match entry {
        Entry::Record(record) => record,
        Entry::Newer(value) => {
            let why = "written by another release".into();
            let (record, state) = (Value::Object(value), State::Unknown { why });
            return Seen { record, state, in_place: InPlace::Unknown, unit_ended: None, progress: None };
        }
    };
    let derive = |record: &Record| {
        let admission = if record.outcome.is_some() { Observed::Free } else { (view.admission)() };
        record.state(&host.boot_id(), &admission, exit_evidence(host, id).as_deref())
    };
    let mut state = derive(&record);
    if matches!(state, State::Interrupted { .. })
        && let Ok(Some(Entry::Record(now))) = self::entry(host, id)
    {
        // It may have ended between the two looks: its outcome was written before admission was free.
        record = now;
        state = if record.outcome.is_some() { State::Ended } else { state };
    }
    record.installation = record.installation_now(view.in_place);
    let progress = (state == State::Running).then(|| progress(host, id)).flatten();
    let in_place = record.in_place(view.in_place);
    let unit_ended = exit_evidence(host, id).filter(|_| state != State::Running);
    Seen { record: serde_json::to_value(record).unwrap_or_default(), state, in_place, unit_ended, progress }
}

/// Leaves how many bytes have come where readers find it; for the attempt that holds admission.
pub(crate) fn show_progress(host: &Host, id: &str, progress: Progress) -> io::Result<()> {
    let text = serde_json::to_vec(&progress).map_err(io::Error::other)?;
    write_fleeting(host, &progress_path(host, id), &text, 0o640, owner(host))
}

fn progress(host: &Host, id: &str) -> Option<Progress> {
    serde_json::from_slice(&read_bounded(&progress_path(host, id), 4096).ok()?).ok()
}

/// Removes what [`show_progress`] left.
pub(crate) fn end_progress(host: &Host, id: &str) {
    let _ = std::fs::remove_file(progress_path(host, id));
}

/// Leaves how a unit ended, in systemd's words, beside the record of its attempt; where that says how it ended by itself
/// there is nothing to add. Returns the attempt's id.
pub(crate) fn leave_exit_evidence(
    host: &Host,
    invocation: &str,
    result: [&str; 3],
) -> io::Result<Option<String>> {
    for (id, content) in all(host)? {
        let Ok(Entry::Record(record)) = content else { continue };
        let by_itself = !matches!(record.outcome, None | Some(Outcome::Interrupted { .. }));
        if record.invocation_id.as_deref() != Some(invocation) || by_itself {
            continue;
        }
        let [service_result, exit_code, exit_status] = result;
        let text = json!({
            "schema": SCHEMA, "at": Timestamp::now(),
            "service_result": service_result, "exit_code": exit_code, "exit_status": exit_status,
        });
        write_whole(host, &exit_path(host, &id), text.to_string().as_bytes(), 0o640, owner(host))?;
        return Ok(Some(id));
    }
    Ok(None)
}

/// Where the bytes that have come are counted.
fn progress_path(host: &Host, id: &str) -> PathBuf {
    host.attempts().join(format!("{id}.progress.json"))
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
        end_progress(host, &id);
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
        end_progress(host, id);
    }
    let _ = sync_parent(&host.attempts().join("any"));
    told
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]
    use super::super::attempt::{Requested, Stage};
    use super::*;

    fn record() -> Record {
        let host = Host::under(Path::new("/nonexistent"), Path::new("/nonexistent"));
        Record::new(&host, &"0a".repeat(16), "install", Requested::Itself, None)
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
        let mut value = serde_json::to_value(record()).unwrap();
        value["id"] = "../../../etc/x".into();
        assert!(parse(value.to_string().as_bytes()).is_err(), "its id is a file's name");
    }

    #[test]
    fn a_record_under_the_name_of_another_is_none_and_the_highest_number_is_no_end() {
        let root = tempfile::tempdir().unwrap();
        let host = Host::under(root.path(), root.path());
        std::fs::create_dir_all(host.attempts()).unwrap();
        let mut record = record();
        record.sequence = u64::MAX;
        let text = serde_json::to_vec(&record).unwrap();
        std::fs::write(record_path(&host, &record.id), &text).unwrap();
        let next = Record::new(&host, &"0b".repeat(16), "install", Requested::Itself, None);
        assert_eq!(next.sequence, u64::MAX);
        std::fs::write(record_path(&host, &"0c".repeat(16)), &text).unwrap();
        let all = all(&host).unwrap();
        let damaged = |content| matches!(content, &Err(ReadError::Damaged { .. }));
        assert_eq!(all.iter().filter(|(_, content)| damaged(content)).count(), 1, "{all:?}");
        assert!(matches!(&all[0], (id, Ok(Entry::Record(first))) if *id == first.id), "{all:?}");
    }
}
