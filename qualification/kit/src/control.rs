//! Changing a running server from outside: a rules file that is watched, and a control socket.
//!
//! | at the control socket | what |
//! | --- | --- |
//! | `GET /_rules` | the rules, each with the number of requests that it was applied to |
//! | `PUT /_rules` | a JSON array of rules in the place of all |
//! | `POST /_rules` | one more rule, behind the others |
//! | `DELETE /_rules` | none any more |
//! | `GET /_log` | everything so far, one JSON object a line |
//! | `DELETE /_log` | forgets it |

use std::fs;
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::timeout;

use crate::answer;
use crate::connection::Shared;
use crate::head::{self, Head, Incoming};
use crate::rule::Rule;

/// How often the rules file is looked at.
const GLANCE: Duration = Duration::from_millis(100);
/// A body at the control socket may be this long.
const LONGEST: usize = 1 << 20;
/// A request at the control socket may take this long.
const PATIENCE: Duration = Duration::from_secs(10);

/// A rules file, and what it held when it was last looked at.
pub(crate) struct RulesFile {
    path: PathBuf,
    held: Option<Vec<u8>>,
}

impl RulesFile {
    /// Reads a rules file for the first time. One that is not there holds no rules.
    pub(crate) fn open(path: PathBuf) -> io::Result<(Self, Vec<Rule>)> {
        let held = read(&path)?;
        let rules = parse(held.as_deref())?;
        Ok((Self { path, held }, rules))
    }

    /// Applies the file again whenever its content changes; a bad one is reported and leaves the rules as they
    /// are.
    pub(crate) async fn follow(mut self, shared: Arc<Shared>, notice: fn(&str)) {
        loop {
            tokio::time::sleep(GLANCE).await;
            let Ok(current) = read(&self.path) else { continue };
            if current == self.held {
                continue;
            }
            self.held = current;
            let path = self.path.display();
            match parse(self.held.as_deref()) {
                Ok(rules) => {
                    notice(&format!("{path} was read again, rules: {}", rules.len()));
                    shared.rules.replace(rules);
                }
                Err(problem) => {
                    notice(&format!("{path} can't be read, the rules stay as they were: {problem}"));
                }
            }
        }
    }
}

fn read(path: &Path) -> io::Result<Option<Vec<u8>>> {
    match fs::read(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(problem) if problem.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(problem) => Err(problem),
    }
}

fn parse(held: Option<&[u8]>) -> io::Result<Vec<Rule>> {
    held.map_or(Ok(Vec::new()), |bytes| serde_json::from_slice(bytes).map_err(io::Error::other))
}

/// Binds the control socket. One that nobody listens to any more is replaced.
pub(crate) fn bind(path: &Path) -> io::Result<UnixListener> {
    let is_socket = fs::symlink_metadata(path).is_ok_and(|data| data.file_type().is_socket());
    if is_socket && UnixStream::connect(path).is_err() {
        fs::remove_file(path)?;
    }
    let listener = UnixListener::bind(path)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// Serves the control socket.
pub(crate) async fn serve(listener: UnixListener, shared: Arc<Shared>) {
    let Ok(listener) = tokio::net::UnixListener::from_std(listener) else { return };
    loop {
        let Ok((mut stream, _)) = listener.accept().await else {
            tokio::time::sleep(GLANCE).await;
            continue;
        };
        let shared = Arc::clone(&shared);
        tokio::spawn(async move {
            // Whoever does not finish a request gets no answer.
            let _ = timeout(PATIENCE, one(&mut stream, &shared)).await;
        });
    }
}

async fn one(stream: &mut tokio::net::UnixStream, shared: &Shared) -> io::Result<()> {
    let mut inbox = Vec::new();
    let answer = match head::read(stream, &mut inbox).await? {
        Incoming::Nothing => return Ok(()),
        Incoming::Refused(status, why) => answer::refusal(status, why),
        Incoming::Request(mut head) => {
            head.keep_alive = false;
            match body(stream, inbox, &head).await? {
                Some(body) => {
                    let (status, text) = act(shared, &head, &body);
                    answer::of_text(&head, status, text)
                }
                None => answer::refusal(413, "the body is too long, or its length is not announced"),
            }
        }
    };
    let mut bytes = answer.head;
    bytes.extend(answer.body.into_bytes());
    stream.write_all(&bytes).await?;
    stream.shutdown().await
}

/// The body of a request; none if it is too long.
async fn body(
    stream: &mut tokio::net::UnixStream,
    mut inbox: Vec<u8>,
    head: &Head,
) -> io::Result<Option<Vec<u8>>> {
    let length = match (head.header("content-length"), head.header("transfer-encoding")) {
        (Some(length), None) => length.parse().ok().filter(|length| *length <= LONGEST),
        (None, None) => Some(0),
        (_, Some(_)) => None,
    };
    let Some(length) = length else { return Ok(None) };
    if head.header("expect").is_some() {
        stream.write_all(b"HTTP/1.1 100 Continue\r\n\r\n").await?;
    }
    let had = inbox.len().min(length);
    inbox.resize(length, 0);
    stream.read_exact(&mut inbox[had..]).await?;
    Ok(Some(inbox))
}

/// A rule and its use.
#[derive(Serialize)]
struct Applied {
    rule: Rule,
    applied: u64,
}

/// Does what was asked for; the answer's status and text.
fn act(shared: &Shared, head: &Head, body: &[u8]) -> (u16, String) {
    match (head.method.as_str(), head.path.as_str()) {
        ("GET", "/_rules") => {
            let rules = shared.rules.list().into_iter().map(|(rule, applied)| Applied { rule, applied });
            let rules: Vec<_> = rules.collect();
            (200, serde_json::to_string_pretty(&rules).unwrap_or_default() + "\n")
        }
        ("PUT", "/_rules") => match serde_json::from_slice::<Vec<Rule>>(body) {
            Ok(rules) => {
                let count = rules.len();
                shared.rules.replace(rules);
                (200, format!("rules: {count}\n"))
            }
            Err(problem) => (400, format!("not a JSON array of rules: {problem}\n")),
        },
        ("POST", "/_rules") => match serde_json::from_slice::<Rule>(body) {
            Ok(rule) => {
                shared.rules.add(rule);
                (200, format!("rules: {}\n", shared.rules.list().len()))
            }
            Err(problem) => (400, format!("not a rule: {problem}\n")),
        },
        ("DELETE", "/_rules") => {
            shared.rules.replace(Vec::new());
            (200, "rules: 0\n".to_owned())
        }
        ("GET", "/_log") => (200, shared.log.lines()),
        ("DELETE", "/_log") => {
            shared.log.clear();
            (200, "forgotten\n".to_owned())
        }
        (_, "/_rules" | "/_log") => (405, "GET, PUT, POST or DELETE\n".to_owned()),
        _ => (404, "there are /_rules and /_log\n".to_owned()),
    }
}
