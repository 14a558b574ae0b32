//! Docker's Engine API over its socket: who answers, and what it said to a request. Every call is bounded.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use hyper::Method;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::http::{self, AskError};
use crate::text::printable;

/// The version of the API that is spoken: that of Engine 25, the oldest that is taken.
const API: (u32, u32) = (1, 44);
/// For an answer that Docker has ready.
pub(crate) const ANSWER: Duration = Duration::from_secs(10);

/// What a Docker says of itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Engine {
    /// Its version: `26.1.5`.
    pub(crate) version: String,
    /// The newest version of its API.
    pub(crate) api: String,
    /// What tells one store of images and containers from another.
    pub(crate) id: String,
    /// Where it keeps everything.
    pub(crate) root: String,
    /// Its storage driver: `overlay2`; `overlayfs` with the containerd image store.
    pub(crate) driver: String,
    /// Whether images are in containerd's store.
    pub(crate) containerd_store: bool,
    /// Whether containers go on while it is restarted.
    pub(crate) live_restore: bool,
    /// How many containers run.
    pub(crate) running: u64,
}

/// Why Docker did not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DockerError {
    /// There is no socket.
    #[error("there is no Docker on this Machine (no {0:?})")]
    Absent(PathBuf),
    /// There is a socket, and nobody listens.
    #[error("Docker is stopped: nobody answers at {0:?}")]
    Stopped(PathBuf),
    /// This account may not ask it.
    #[error("this account may not ask Docker ({0:?}: permission denied)")]
    NotPermitted(PathBuf),
    /// It did not answer in time.
    #[error("Docker did not answer {what} within {seconds} s")]
    Slow { what: String, seconds: u64 },
    /// The connection broke: it was stopped, or crashed.
    #[error("Docker's connection broke while it was asked {what}: {why}")]
    Broken { what: String, why: String },
    /// Something else than Docker's engine answers.
    #[error("what answers at Docker's socket is {0}, not Docker's engine")]
    Foreign(String),
    /// It is older than what is taken.
    #[error("Docker {version} is too old (API {api}): Engine 25 with API 1.44 is the oldest that is used")]
    TooOld { version: String, api: String },
    /// It is newer than this API.
    #[error("Docker {version} does not speak API 1.44 any more (from {least} on)")]
    TooNew { version: String, least: String },
    /// It said no.
    #[error("Docker refused {what} ({status}): {message}")]
    Refused { what: String, status: u16, message: String },
    /// What it said is not understood.
    #[error("Docker's answer to {what} is not understood: {why}")]
    NotUnderstood { what: String, why: String },
}

impl DockerError {
    /// Whether Docker itself is away, so that nothing is known of what it holds.
    pub(crate) fn is_away(&self) -> bool {
        !matches!(self, Self::Refused { .. } | Self::NotUnderstood { .. })
    }

    /// The status of an answer that says no.
    pub(crate) fn status(&self) -> Option<u16> {
        match self {
            Self::Refused { status, .. } => Some(*status),
            _ => None,
        }
    }

    /// What to type.
    pub(crate) fn help(&self) -> &'static str {
        match self {
            Self::Absent(_) => "let install put it here: sudo /usr/local/bin/ployzd install --docker auto",
            Self::Stopped(_) => "start it: sudo systemctl start docker.service",
            Self::NotPermitted(_) => "let install give it: sudo /usr/local/bin/ployzd install --docker auto",
            Self::Slow { .. } | Self::Broken { .. } => {
                "look at it: systemctl status docker.service; journalctl -u docker.service -n 20"
            }
            Self::Foreign(_) => "stop what listens there, and start Docker's engine: ls -la /run/docker.sock",
            Self::TooOld { .. } => "upgrade Docker as part of the host's own maintenance",
            Self::TooNew { .. } => "upgrade Ployz: this release does not know that Docker",
            Self::Refused { .. } | Self::NotUnderstood { .. } => {
                "look at: journalctl -u docker.service -n 20"
            }
        }
    }
}

/// Who answers at a socket, for a function that is not asynchronous.
pub(crate) fn engine_now(socket: PathBuf) -> Result<Engine, DockerError> {
    let broken = |e: io::Error| DockerError::Broken { what: "GET /version".into(), why: e.to_string() };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(broken)?;
    runtime.block_on(Docker::at(socket).engine())
}

/// Docker's engine behind its socket.
#[derive(Debug, Clone)]
pub(crate) struct Docker {
    socket: PathBuf,
}

impl Docker {
    pub(crate) fn at(socket: PathBuf) -> Self {
        Self { socket }
    }

    /// Who answers, if it is one that is used here.
    pub(crate) async fn engine(&self) -> Result<Engine, DockerError> {
        let version = self.raw(Method::GET, "/version", None, ANSWER).await?;
        judge(&version)?;
        let info = self.get("/info").await?;
        let text = |value: &Value, field: &str| printable(value[field].as_str().unwrap_or_default());
        let containerd = info["DriverStatus"].as_array().is_some_and(|rows| {
            rows.iter().any(|row| row[1].as_str().is_some_and(|v| v.starts_with("io.containerd.snapshotter")))
        });
        Ok(Engine {
            version: text(&version, "Version"),
            api: text(&version, "ApiVersion"),
            id: text(&info, "ID"),
            root: text(&info, "DockerRootDir"),
            driver: text(&info, "Driver"),
            containerd_store: containerd,
            live_restore: info["LiveRestoreEnabled"].as_bool().unwrap_or_default(),
            running: info["ContainersRunning"].as_u64().unwrap_or_default(),
        })
    }

    /// What it has under a path.
    pub(crate) async fn get(&self, path: &str) -> Result<Value, DockerError> {
        self.call(Method::GET, path, None, ANSWER).await
    }

    /// The same, where it may not be there.
    pub(crate) async fn find(&self, path: &str) -> Result<Option<Value>, DockerError> {
        match self.get(path).await {
            Err(e) if e.status() == Some(404) => Ok(None),
            other => other.map(Some),
        }
    }

    /// Asks it to do something.
    pub(crate) async fn call(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
        deadline: Duration,
    ) -> Result<Value, DockerError> {
        self.raw(method, &format!("/v{}.{}{path}", API.0, API.1), body, deadline).await
    }

    async fn raw(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
        deadline: Duration,
    ) -> Result<Value, DockerError> {
        let what = format!("{method} {}", path.split('?').next().unwrap_or(path));
        let answer = http::ask(&self.socket, method, path, body, deadline).await;
        let (status, body) = answer.map_err(|e| self.away(e, &what))?;
        if !(200..400).contains(&status) {
            return Err(refused(what, status, &body));
        }
        if body.is_empty() {
            return Ok(Value::Null);
        }
        serde_json::from_slice(&body).map_err(|e| DockerError::NotUnderstood { what, why: e.to_string() })
    }

    /// The last lines that a container wrote, without what marks its streams.
    pub(crate) async fn last_words(&self, container: &str) -> String {
        let path = format!("/v{}.{}/containers/{container}/logs?stdout=1&stderr=1&tail=10", API.0, API.1);
        let answer = http::ask(&self.socket, Method::GET, &path, None, ANSWER).await;
        let Ok((200, bytes)) = answer else { return String::new() };
        printable(&String::from_utf8_lossy(&frames(&bytes)))
    }

    /// Pulls an image; each object that Docker says on the way is given to `tell`. Nothing for `stall` ends it.
    pub(crate) async fn pull(
        &self,
        name: &str,
        tag: &str,
        stall: Duration,
        tell: &mut dyn FnMut(&Value),
    ) -> Result<(), DockerError> {
        let what = "to pull the image".to_owned();
        let path =
            format!("/v{}.{}/images/create?fromImage={}&tag={}", API.0, API.1, escaped(name), escaped(tag));
        let mut lines = Lines::default();
        let mut failed = None;
        let mut other = Vec::new();
        let mut sink = |status: u16, bytes: &[u8]| {
            if status != 200 {
                other.extend_from_slice(&bytes[..bytes.len().min(4096_usize.saturating_sub(other.len()))]);
                return Ok(());
            }
            lines.take(bytes, &mut |value| {
                if let Some(error) = value["error"].as_str() {
                    failed = Some(printable(error));
                }
                tell(&value);
            })
        };
        let asked = http::stream(&self.socket, Method::POST, &path, &[], None, stall, &mut sink).await;
        let status = asked.map_err(|e| self.away(e, &what))?;
        match (status, failed) {
            (200, None) => Ok(()),
            (200, Some(message)) => Err(DockerError::Refused { what, status: 500, message }),
            (status, _) => Err(refused(what, status, &other)),
        }
    }

    fn away(&self, error: AskError, what: &str) -> DockerError {
        let (socket, what) = (self.socket.clone(), what.to_owned());
        match error {
            AskError::Connect { source, .. } => match source.kind() {
                io::ErrorKind::NotFound => DockerError::Absent(socket),
                io::ErrorKind::PermissionDenied => DockerError::NotPermitted(socket),
                _ => DockerError::Stopped(socket),
            },
            AskError::Deadline { deadline, .. } => DockerError::Slow { what, seconds: deadline.as_secs() },
            AskError::Broken { source, .. } => DockerError::Broken { what, why: source.to_string() },
        }
    }
}

/// Whether what answered `/version` is an engine that is used here.
fn judge(version: &Value) -> Result<(), DockerError> {
    let text = |field: &str| printable(version[field].as_str().unwrap_or_default());
    let components = version["Components"].as_array();
    let engine = components.and_then(|all| all.first()).and_then(|first| first["Name"].as_str());
    if engine != Some("Engine") {
        let named = engine.or(version["Platform"]["Name"].as_str()).unwrap_or("something without a name");
        return Err(DockerError::Foreign(printable(named)));
    }
    let number = |field: &str| {
        let (major, minor) = text(field).split_once('.').map(|(a, b)| (a.parse(), b.parse()))?;
        Some((major.ok()?, minor.ok()?))
    };
    match (number("ApiVersion"), number("MinAPIVersion")) {
        (Some(newest), _) if newest < API => {
            Err(DockerError::TooOld { version: text("Version"), api: text("ApiVersion") })
        }
        (_, Some(least)) if least > API => {
            Err(DockerError::TooNew { version: text("Version"), least: text("MinAPIVersion") })
        }
        (Some(_), _) => Ok(()),
        (None, _) => {
            let why = "it names no version of its API".to_owned();
            Err(DockerError::NotUnderstood { what: "GET /version".into(), why })
        }
    }
}

fn refused(what: String, status: u16, body: &[u8]) -> DockerError {
    let message = serde_json::from_slice::<Value>(body).ok();
    let message = message.as_ref().and_then(|value| value["message"].as_str()).map(printable);
    let message =
        message.unwrap_or_else(|| printable(&String::from_utf8_lossy(&body[..body.len().min(200)])));
    DockerError::Refused { what, status, message }
}

/// The payload of a container's log: each frame has a head of 8 bytes that ends with its length. A container with a
/// terminal has no frames.
fn frames(mut bytes: &[u8]) -> Vec<u8> {
    let mut text = Vec::new();
    while let [stream @ 0..=2, 0, 0, 0, a, b, c, d, rest @ ..] = bytes {
        let _ = stream;
        let length = (u32::from_be_bytes([*a, *b, *c, *d]) as usize).min(rest.len());
        text.extend_from_slice(&rest[..length]);
        bytes = &rest[length..];
    }
    text.extend_from_slice(bytes);
    text
}

/// JSON objects, one a line, out of bytes as they come.
#[derive(Debug, Default)]
pub(crate) struct Lines {
    unread: Vec<u8>,
}

impl Lines {
    /// The longest line, in bytes.
    const MOST: usize = 256 * 1024;

    /// Takes more bytes and tells of each object that is complete.
    pub(crate) fn take(&mut self, bytes: &[u8], tell: &mut dyn FnMut(Value)) -> Result<(), String> {
        self.unread.extend_from_slice(bytes);
        while let Some(end) = self.unread.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = self.unread.drain(..=end).collect();
            if !line.trim_ascii().is_empty() {
                tell(serde_json::from_slice(&line).map_err(|e| e.to_string())?);
            }
        }
        if self.unread.len() > Self::MOST { Err("a line does not end".into()) } else { Ok(()) }
    }
}

/// A text as a value in a query.
pub(crate) fn escaped(text: &str) -> String {
    let mut escaped = String::new();
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            escaped.push(char::from(byte));
        } else {
            escaped.push_str(&format!("%{byte:02X}"));
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use serde_json::json;

    use super::*;

    #[test]
    fn only_an_engine_that_is_known_is_used() {
        let version = |name: &str, api: &str, least: &str| json!({"Version": "1", "ApiVersion": api, "MinAPIVersion": least, "Components": [{"Name": name}]});
        assert!(judge(&version("Engine", "1.45", "1.24")).is_ok());
        assert!(judge(&version("Engine", "1.44", "1.44")).is_ok());
        let said = |value: &Value| judge(value).unwrap_err().to_string();
        assert!(said(&version("Engine", "1.41", "1.12")).contains("too old (API 1.41)"));
        assert!(said(&version("Engine", "1.60", "1.50")).contains("any more (from 1.50 on)"));
        assert!(said(&version("Podman Engine", "1.41", "1.24")).contains("is Podman Engine, not"));
        assert!(said(&json!({})).contains("something without a name"));
        assert!(said(&version("Engine", "new", "1.24")).contains("names no version"));
    }

    #[test]
    fn what_comes_in_pieces_is_read() {
        let mut lines = Lines::default();
        let mut seen = Vec::new();
        for piece in ["{\"a\":", "1}\n\n{\"b\"", ":2}\r\n", "{"] {
            lines.take(piece.as_bytes(), &mut |value| seen.push(value)).unwrap();
        }
        assert_eq!(seen, [json!({"a": 1}), json!({"b": 2})]);
        assert!(lines.take(b"x\n", &mut |_| ()).is_err());
        assert!(Lines::default().take(&vec![b' '; Lines::MOST + 1], &mut |_| ()).is_err());
        assert_eq!(frames(b"\x01\0\0\0\0\0\0\x03one\x02\0\0\0\0\0\0\x09two"), b"onetwo");
        assert_eq!(frames(b"plain"), b"plain");
        assert_eq!(escaped("a/b:c&d"), "a%2Fb%3Ac%26d");
    }
}
