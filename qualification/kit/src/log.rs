//! What was asked of a server and what it answered.

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::Serialize;
use time::OffsetDateTime;

use crate::head::Head;
use crate::rule::Rule;

/// So many records are kept in memory, the newest.
const KEPT: usize = 10_000;

/// One request, or one connection that came to nothing.
#[derive(Clone, Debug, Serialize)]
pub struct Record {
    /// When it arrived, in UTC.
    pub at: String,
    /// What it was.
    pub event: Event,
    /// Which connection it came on, counted from 1.
    pub connection: u64,
    /// Where it came from.
    pub peer: SocketAddr,
    /// The method; empty when it was not a request.
    pub method: String,
    /// The path, decoded, without the query.
    pub path: String,
    /// The query.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub query: Option<String>,
    /// The `Range` header as it was sent.
    pub range: Option<String>,
    /// All headers, names in lower case.
    #[serde(skip)]
    pub headers: Vec<(String, String)>,
    /// The status that was answered; 0 when none was.
    pub status: u16,
    /// How many bytes of the body were handed to the kernel.
    pub sent: u64,
    /// The rule that was applied.
    pub rule: Option<Rule>,
    /// What went wrong on the way, other than by the rule.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
    /// Whether the server is done with it.
    pub finished: bool,
    /// Which record it is, counted from 1.
    #[serde(skip)]
    pub(crate) number: u64,
}

/// What a record is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Event {
    /// A request.
    Request,
    /// A connection to which a rule was applied before anything was read.
    Accept,
    /// A TLS handshake that failed.
    Handshake,
}

impl Record {
    /// A record of something that happened to a connection just now.
    pub(crate) fn of_connection(event: Event, connection: u64, peer: SocketAddr) -> Self {
        Self {
            at: rfc3339(SystemTime::now()),
            event,
            connection,
            peer,
            method: String::new(),
            path: String::new(),
            query: None,
            range: None,
            headers: Vec::new(),
            status: 0,
            sent: 0,
            rule: None,
            problem: None,
            finished: false,
            number: 0,
        }
    }

    /// A record of a request that was read just now.
    pub(crate) fn of_request(head: &Head, connection: u64, peer: SocketAddr) -> Self {
        Self {
            method: head.method.clone(),
            path: head.path.clone(),
            query: head.query.clone(),
            range: head.header("range").map(str::to_owned),
            headers: head.headers.clone(),
            ..Self::of_connection(Event::Request, connection, peer)
        }
    }

    /// A header of the request.
    #[must_use]
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers
            .iter()
            .find(|(known, _)| known.eq_ignore_ascii_case(name))
            .map(|(_, value)| value.as_str())
    }

    fn line(&self) -> String {
        serde_json::to_string(self).unwrap_or_else(|problem| format!("{{\"problem\":\"{problem}\"}}")) + "\n"
    }
}

/// The records of one server: the newest in memory, and each as a line of a file when it is finished.
#[derive(Debug, Default)]
pub(crate) struct Log {
    records: Mutex<Records>,
    file: Option<File>,
}

#[derive(Debug, Default)]
struct Records {
    last: u64,
    unfinished: usize,
    kept: VecDeque<Record>,
}

impl Log {
    /// A log that appends to a file too.
    pub(crate) fn to_file(path: Option<&Path>) -> io::Result<Self> {
        let open = |path| OpenOptions::new().create(true).append(true).open(path);
        Ok(Self { file: path.map(open).transpose()?, ..Self::default() })
    }

    /// Notes that something began, before anything is answered to it, so that whoever was answered finds it.
    pub(crate) fn begin(&self, record: &mut Record) {
        let mut records = self.lock();
        records.last += 1;
        records.unfinished += 1;
        record.number = records.last;
        if records.kept.len() == KEPT {
            records.kept.pop_front();
        }
        records.kept.push_back(record.clone());
    }

    /// Notes how far it is.
    pub(crate) fn update(&self, record: &Record) {
        let mut records = self.lock();
        if let Some(kept) = records.kept.iter_mut().rfind(|kept| kept.number == record.number) {
            kept.clone_from(record);
        }
    }

    /// Notes how much of the body was sent.
    pub(crate) fn sent(&self, number: u64, sent: u64) {
        if let Some(kept) = self.lock().kept.iter_mut().rfind(|kept| kept.number == number) {
            kept.sent = sent;
        }
    }

    /// Notes the end.
    pub(crate) fn finish(&self, record: &mut Record) {
        record.finished = true;
        self.update(record);
        self.lock().unfinished -= 1;
        if let Some(mut file) = self.file.as_ref() {
            // One write is one whole line even when several servers append. A full disk must not stop them.
            let _ = file.write_all(record.line().as_bytes());
        }
    }

    /// A copy of what is kept.
    pub(crate) fn records(&self) -> Vec<Record> {
        self.lock().kept.iter().cloned().collect()
    }

    /// What is kept, one object a line.
    pub(crate) fn lines(&self) -> String {
        self.lock().kept.iter().map(Record::line).collect()
    }

    /// Forgets what is kept.
    pub(crate) fn clear(&self) {
        self.lock().kept.clear();
    }

    /// Whether everything that began is finished.
    pub(crate) fn is_settled(&self) -> bool {
        self.lock().unfinished == 0
    }

    fn lock(&self) -> MutexGuard<'_, Records> {
        self.records.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// `2026-01-02T03:04:05.678Z`.
fn rfc3339(at: SystemTime) -> String {
    let since = at.duration_since(UNIX_EPOCH).unwrap_or_default();
    let seconds = i64::try_from(since.as_secs()).unwrap_or_default();
    let at = OffsetDateTime::from_unix_timestamp(seconds).unwrap_or(OffsetDateTime::UNIX_EPOCH);
    let (year, month, day) = at.to_calendar_date();
    let (hour, minute, second) = at.to_hms();
    let (month, millis) = (u8::from(month), since.subsec_millis());
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{millis:03}Z")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn time_is_written_as_rfc3339() {
        assert_eq!(
            rfc3339(UNIX_EPOCH + Duration::from_millis(1_767_323_045_678)),
            "2026-01-02T03:04:05.678Z"
        );
    }

    #[test]
    fn the_newest_are_kept_and_the_end_is_counted() {
        let log = Log::default();
        let peer = ([127, 0, 0, 1], 1).into();
        for number in 1..=10_010 {
            let mut record = Record::of_connection(Event::Accept, number, peer);
            log.begin(&mut record);
            assert!(!log.is_settled());
            log.finish(&mut record);
        }
        assert!(log.is_settled());
        assert_eq!(log.records().len(), 10_000);
        assert_eq!(log.records()[0].connection, 11);
    }
}
