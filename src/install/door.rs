//! The door: what is said over the privileged socket. One line in, one line out; whoever reads believes neither.

use std::io::{self, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::attempt::is_id;
use super::release::{Channel, Version};
use crate::line::LineError;

/// The longest request, in bytes, its newline included.
pub(crate) const MOST_REQUEST: usize = 4096;
/// For an answer that nobody takes.
const ANSWER: Duration = Duration::from_secs(2);
/// The longest answer, in bytes.
const MOST_ANSWER: u64 = 512 * 1024;

/// What may be asked for: an exact release under an attempt's id. There is no field for a source, path, digest or
/// command, and one that is not known refuses the whole.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Asked {
    /// The id that the attempt shall have.
    pub(crate) attempt: String,
    /// The exact release.
    pub(crate) version: Version,
    /// The channel that it was resolved from: recorded, never used to choose.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) channel: Option<Channel>,
}

/// What comes back. The records in it are shown as they are: worker and daemon may be of two releases.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    /// The attempt's record is durable, and the attempt goes on.
    Accepted(Value),
    /// This id has a record already, for this version.
    Existing(Value),
    /// This id has a record already, for another version.
    Conflict(Value),
    /// Another has admission.
    Busy {
        /// Who, in words.
        what: String,
        /// Its attempt, where that is known.
        attempt: Option<String>,
    },
    /// Nothing was accepted.
    Rejected {
        /// Why.
        reason: String,
        /// What to do, a line each.
        #[serde(default)]
        help: Vec<String>,
    },
}

/// Reads what a line asks for.
pub(crate) fn read_request(line: &[u8]) -> Result<Asked, LineError> {
    // A list of the values would do for the reader of JSON as well.
    if line.trim_ascii_start().first() != Some(&b'{') {
        return Err(LineError::Content("it is no JSON object".into()));
    }
    let asked: Asked = serde_json::from_slice(line).map_err(|e| LineError::Content(e.to_string()))?;
    if is_id(&asked.attempt) {
        return Ok(asked);
    }
    Err(LineError::Content("attempt is not 32 lower-case hex digits".into()))
}

/// Answers, and closes the connection. Whoever does not take it can look the attempt up.
pub(crate) fn answer(mut connection: UnixStream, answer: &Answer) -> io::Result<()> {
    let mut line = serde_json::to_vec(answer).map_err(io::Error::other)?;
    line.push(b'\n');
    connection.set_write_timeout(Some(ANSWER))?;
    connection.write_all(&line)?;
    connection.shutdown(std::net::Shutdown::Both)
}

/// Why the door gave no answer.
#[derive(Debug, thiserror::Error)]
pub enum DoorError {
    /// Nobody listens, or this process may not connect.
    #[error("the upgrade door can't be reached: {0}")]
    Connect(io::Error),
    /// It was closed without an answer: there were too many connections, or no worker could be started.
    #[error("the upgrade door closed without an answer: {0}")]
    Closed(String),
    /// No answer came in time.
    #[error("the upgrade door did not answer within {} s", .0.as_secs())]
    Deadline(Duration),
    /// What came is no answer.
    #[error("the upgrade door's answer is not understood: {0}")]
    NotUnderstood(String),
}

/// Asks at the door.
pub(crate) async fn ask(door: &Path, asked: &Asked, deadline: Duration) -> Result<Answer, DoorError> {
    let exchange = async {
        let mut connection = tokio::net::UnixStream::connect(door).await.map_err(DoorError::Connect)?;
        let closed = |e: io::Error| DoorError::Closed(e.to_string());
        let mut line = serde_json::to_vec(asked).map_err(|e| DoorError::NotUnderstood(e.to_string()))?;
        line.push(b'\n');
        // A worker that has no use for the request has answered already.
        let sent = connection.write_all(&line).await;
        let mut text = Vec::new();
        let read = (&mut connection).take(MOST_ANSWER).read_to_end(&mut text).await;
        if text.is_empty() {
            read.map_err(closed)?;
            sent.map_err(closed)?;
            return Err(DoorError::Closed("not a byte came".into()));
        }
        serde_json::from_slice(&text).map_err(|e| DoorError::NotUnderstood(e.to_string()))
    };
    tokio::time::timeout(deadline, exchange).await.unwrap_or(Err(DoorError::Deadline(deadline)))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    const ID: &str = "0123456789abcdef0123456789abcdef";

    #[test]
    fn a_request_is_an_id_and_a_version_and_nothing_else() {
        let good = format!(r#"{{"attempt":"{ID}","version":"1.4.0","channel":"stable"}}"#);
        let asked = read_request(good.as_bytes()).unwrap();
        assert_eq!((asked.version.to_string().as_str(), asked.channel), ("1.4.0", Some(Channel::Stable)));
        let line = |fields: &str| format!(r#"{{"attempt":"{ID}","version":"1.4.0"{fields}}}"#);
        assert_eq!(read_request(line("").as_bytes()).unwrap().channel, None);
        for (what, bad) in [
            ("a source", line(r#","url":"https://example.test/x""#)),
            ("a path", line(r#","path":"/tmp/ployzd""#)),
            ("a digest", line(r#","sha256":"00""#)),
            ("a command", line(r#","command":["sh"]"#)),
            ("a key twice", line(r#","version":"1.5.0""#)),
            ("an unknown channel", line(r#","channel":"nightly""#)),
            ("a nested value", line(r#","channel":{"stable":true}"#)),
            ("deep nesting", format!("{}{}", "[".repeat(2000), "]".repeat(2000))),
            ("a version that is none", good.replace("1.4.0", "1.4")),
            ("a version with a path", good.replace("1.4.0", "../1.4.0")),
            ("a version with a sign", good.replace("1.4.0", "v1.4.0")),
            ("a number", good.replace("\"1.4.0\"", "14")),
            ("no version", format!(r#"{{"attempt":"{ID}"}}"#)),
            ("a short id", good.replace(ID, "0123")),
            ("an id in upper case", good.replace(ID, &ID.to_uppercase())),
            ("an id that is a path", good.replace(ID, "../../../../../../etc/shadow0000")),
            ("two values", format!("{good}{good}")),
            ("a list", format!("[{good}]")),
            ("a list of the values", format!(r#"["{ID}","1.4.0","stable"]"#)),
            ("nothing", String::new()),
        ] {
            assert!(read_request(bad.as_bytes()).is_err(), "{what}: {bad}");
        }
        assert!(read_request(b"\xff\xfe{\"attempt\"").is_err());
        assert!(read_request(&[0; 64]).is_err());
    }

    #[test]
    fn an_answer_is_read_back() {
        for sent in [
            Answer::Accepted(serde_json::json!({"id": ID})),
            Answer::Busy { what: "install".into(), attempt: None },
            Answer::Rejected { reason: "no".into(), help: vec![] },
        ] {
            let (ours, mut theirs) = UnixStream::pair().unwrap();
            answer(ours, &sent).unwrap();
            let mut text = String::new();
            std::io::Read::read_to_string(&mut theirs, &mut text).unwrap();
            assert_eq!(serde_json::from_str::<Answer>(&text).unwrap(), sent);
        }
    }
}
