//! The deploy door: what is said over its socket. One line in, lines out, the last of which is the answer; whoever reads
//! believes neither.

use std::path::Path;
use std::time::Duration;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::spec::Spec;
use crate::docker::Lines;
use crate::line::LineError;

/// The longest request, in bytes, its newline included.
pub(crate) const MOST_REQUEST: usize = 128 * 1024;
/// The longest answer, in bytes.
const MOST_ANSWER: usize = 4 * 1024 * 1024;

/// What may be asked for. A field or word that is not known refuses the whole.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
pub(crate) enum Asked {
    /// One container of ours, as specified.
    Deploy(Spec),
    /// Its removal. Volumes and images stay.
    Remove(Named),
    /// What is deployed.
    List(Nothing),
    /// Which Docker there is, and who deploys now.
    Info(Nothing),
    /// The end of a replacement that was cut off.
    Settle(Nothing),
}

/// A service by name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Named {
    pub(crate) name: String,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Nothing {}

/// What comes back.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Said {
    /// How far it is. More follows.
    Progress(Progress),
    /// It is done: what was observed.
    Done(Value),
    /// Another changes the Machine.
    Busy {
        /// What it does.
        what: String,
        /// Since when, where that is known.
        since: Option<Timestamp>,
    },
    /// It was not done.
    Failed(Failed),
}

/// How far a Deploy is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Progress {
    /// `pulling`, `unpacking`, `creating`, `stopping`, `starting`, `watching`, `finishing`, `restoring`.
    pub(crate) stage: String,
    /// What is worth knowing of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) detail: Option<String>,
    /// So many bytes have come.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) bytes: Option<u64>,
    /// Of so many.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) total: Option<u64>,
}

/// Why it was not done, and what serves now.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Failed {
    /// A stable word: `docker`, `image`, `port`, `volume`, `not_ours`, `unhealthy`, `engine_changed`, `interrupted`…
    pub(crate) reason: String,
    /// What was observed.
    pub(crate) error: String,
    /// The state of the service now, in words.
    #[serde(default)]
    pub(crate) now: String,
    /// What to type, a line each.
    #[serde(default)]
    pub(crate) help: Vec<String>,
}

/// Reads what a line asks for.
pub(crate) fn read_request(line: &[u8]) -> Result<Asked, LineError> {
    if line.trim_ascii_start().first() != Some(&b'{') {
        return Err(LineError::Content("it is no JSON object".into()));
    }
    let asked: Asked = serde_json::from_slice(line).map_err(|e| LineError::Content(e.to_string()))?;
    let shape: Value = serde_json::from_slice(line).map_err(|e| LineError::Content(e.to_string()))?;
    let values: Vec<&Value> = shape.as_object().into_iter().flat_map(|object| object.values()).collect();
    if !values.iter().all(|value| super::spec::has_names(value)) {
        return Err(LineError::Content("a list stands in the place of an object".into()));
    }
    let problems = match &asked {
        Asked::Deploy(spec) => spec.problems(),
        Asked::Remove(Named { name }) if !super::spec::is_name(name) => {
            vec![format!("{:?} is not a service's name", name.chars().take(80).collect::<String>())]
        }
        Asked::Remove(_) | Asked::List(_) | Asked::Info(_) | Asked::Settle(_) => Vec::new(),
    };
    if problems.is_empty() { Ok(asked) } else { Err(LineError::Content(problems.join("; "))) }
}

/// Why the door gave no answer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DoorError {
    /// Nobody listens, or this process may not connect.
    #[error("the deploy door can't be reached: {0}")]
    Connect(std::io::Error),
    /// It was closed without an answer.
    #[error("the deploy door closed without an answer: {0}")]
    Closed(String),
    /// Nothing came for so long.
    #[error("nothing came from the deploy door for {} s", .0.as_secs())]
    Stalled(Duration),
    /// What came is no answer.
    #[error("the deploy door's answer is not understood: {0}")]
    NotUnderstood(String),
}

impl DoorError {
    /// Whether it was certainly not asked.
    pub(crate) fn was_not_asked(&self) -> bool {
        matches!(self, Self::Connect(_))
    }
}

/// Asks at the door; `tell` is told of everything but the answer. Nothing for `stall` ends it.
pub(crate) async fn ask(
    door: &Path,
    asked: &Asked,
    stall: Duration,
    tell: &mut (dyn FnMut(Progress) + Send),
) -> Result<Said, DoorError> {
    let stalled = |_| DoorError::Stalled(stall);
    let connecting = tokio::time::timeout(stall, tokio::net::UnixStream::connect(door));
    let mut connection = connecting.await.map_err(stalled)?.map_err(DoorError::Connect)?;
    let mut line = serde_json::to_vec(asked).map_err(|e| DoorError::NotUnderstood(e.to_string()))?;
    line.push(b'\n');
    // A worker that has no use for the request has answered already.
    let sent = tokio::time::timeout(stall, connection.write_all(&line)).await.map_err(stalled)?;
    let mut lines = Lines::default();
    let (mut buffer, mut total) = (vec![0; 64 * 1024], 0);
    loop {
        let read = tokio::time::timeout(stall, connection.read(&mut buffer)).await.map_err(stalled)?;
        let count = match read {
            Ok(0) => {
                let why = sent.err().map_or_else(|| "it ended".into(), |e| e.to_string());
                return Err(DoorError::Closed(why));
            }
            Ok(count) => count,
            Err(e) => return Err(DoorError::Closed(e.to_string())),
        };
        total += count;
        let mut values = Vec::new();
        lines.take(&buffer[..count], &mut |value| values.push(value)).map_err(DoorError::NotUnderstood)?;
        for value in values {
            match serde_json::from_value(value) {
                Ok(Said::Progress(progress)) => tell(progress),
                Ok(answer) => return Ok(answer),
                Err(e) => return Err(DoorError::NotUnderstood(e.to_string())),
            }
        }
        if total > MOST_ANSWER {
            return Err(DoorError::NotUnderstood("it does not end".into()));
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn only_what_is_known_may_be_asked() {
        for good in [
            r#"{"deploy":{"name":"web","image":"web:1"}}"#,
            r#"{"remove":{"name":"web"}}"#,
            r#"{"list":{}}"#,
            r#"{"info":{}}"#,
            r#"{"settle":{}}"#,
        ] {
            read_request(good.as_bytes()).unwrap();
        }
        for bad in [
            "",
            "{}",
            "[]",
            r#""list""#,
            r#"{"list":{},"info":{}}"#,
            r#"{"list":{"all":true}}"#,
            r#"{"list":null}"#,
            r#"{"exec":{"name":"web"}}"#,
            r#"{"remove":{"name":"../web"}}"#,
            r#"{"remove":{"name":"web","force":true}}"#,
            r#"{"deploy":{"name":"web","image":"web","privileged":true}}"#,
            r#"{"deploy":{"name":"web","name":"db","image":"web"}}"#,
            r#"{"deploy":["web","web:1"]}"#,
            r#"[{"list":{}}]"#,
        ] {
            assert!(read_request(bad.as_bytes()).is_err(), "{bad}");
        }
        assert!(read_request(b"{\"deploy\":\xff\xfe").is_err());
    }
}
