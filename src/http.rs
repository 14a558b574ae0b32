//! HTTP as a client of a Unix socket: bounded in time and size.

use std::path::Path;
use std::time::Duration;

use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Bytes;
use hyper::{Method, Request};
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;

/// The longest answer that is read, in bytes.
const MOST_ANSWER: usize = 1024 * 1024;

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AskError {
    /// Nobody listens, or this process may not connect.
    #[error("connecting to {socket:?}: {source}")]
    Connect { socket: std::path::PathBuf, source: std::io::Error },
    /// Connected, and no answer in time.
    #[error("{socket:?} did not answer within {} ms", .deadline.as_millis())]
    Deadline { socket: std::path::PathBuf, deadline: Duration },
    /// Connected, and the connection broke, or something else than HTTP came.
    #[error("asking {socket:?}: {source}")]
    Broken { socket: std::path::PathBuf, source: Box<dyn std::error::Error + Send + Sync> },
}

/// Asks once over a Unix socket; status and body come back whatever the status is.
pub(crate) async fn ask(
    socket: &Path,
    method: Method,
    uri: &str,
    body: Option<&serde_json::Value>,
    deadline: Duration,
) -> Result<(u16, Bytes), AskError> {
    let broken = |source| AskError::Broken { socket: socket.to_owned(), source };
    let exchange = async {
        let stream = UnixStream::connect(socket)
            .await
            .map_err(|source| AskError::Connect { socket: socket.to_owned(), source })?;
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
            .await
            .map_err(|e| broken(e.into()))?;
        let bytes = body.map(|value| Bytes::from(value.to_string())).unwrap_or_default();
        let request = Request::builder()
            .method(method)
            .uri(uri)
            .header("host", "machine")
            .header("content-type", "application/json")
            .body(Full::new(bytes))
            .map_err(|e| broken(e.into()))?;
        let answer = async {
            let answer = sender.send_request(request).await.map_err(|e| broken(e.into()))?;
            let status = answer.status().as_u16();
            let body = Limited::new(answer.into_body(), MOST_ANSWER).collect().await.map_err(broken)?;
            Ok((status, body.to_bytes()))
        };
        tokio::pin!(answer);
        tokio::select! {
            done = &mut answer => done,
            ended = connection => match ended {
                Ok(()) => answer.await,
                Err(e) => Err(broken(e.into())),
            },
        }
    };
    let late = AskError::Deadline { socket: socket.to_owned(), deadline };
    tokio::time::timeout(deadline, exchange).await.unwrap_or(Err(late))
}

/// Asks once, from a function that is not asynchronous.
pub(crate) fn ask_blocking(
    socket: &Path,
    method: Method,
    uri: &str,
    body: Option<&serde_json::Value>,
    deadline: Duration,
) -> Result<(u16, Bytes), AskError> {
    let broken = |e: std::io::Error| AskError::Broken { socket: socket.to_owned(), source: e.into() };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(broken)?;
    runtime.block_on(ask(socket, method, uri, body, deadline))
}

/// Takes a piece of an answer's body, with the answer's status; an error ends the exchange.
pub(crate) type Sink<'a> = &'a mut dyn FnMut(u16, &[u8]) -> Result<(), String>;

/// Asks once and gives the body to `sink` as it comes: for answers that are long or slow. Nothing for `stall` ends it.
/// The sink ends it by an error. Returns the status.
pub(crate) async fn stream(
    socket: &Path,
    method: Method,
    uri: &str,
    headers: &[(&str, &str)],
    body: Option<&serde_json::Value>,
    stall: Duration,
    sink: Sink<'_>,
) -> Result<u16, AskError> {
    let broken = |source| AskError::Broken { socket: socket.to_owned(), source };
    let late = || AskError::Deadline { socket: socket.to_owned(), deadline: stall };
    let stream = tokio::time::timeout(stall, UnixStream::connect(socket))
        .await
        .map_err(|_| late())?
        .map_err(|source| AskError::Connect { socket: socket.to_owned(), source })?;
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(|e| broken(e.into()))?;
    let bytes = body.map(|value| Bytes::from(value.to_string())).unwrap_or_default();
    let mut request = Request::builder()
        .method(method)
        .uri(uri)
        .header("host", "machine")
        .header("content-type", "application/json");
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let request = request.body(Full::new(bytes)).map_err(|e| broken(e.into()))?;
    let exchange = async {
        let sent = tokio::time::timeout(stall, sender.send_request(request)).await.map_err(|_| late())?;
        let answer = sent.map_err(|e| broken(e.into()))?;
        let status = answer.status().as_u16();
        let mut body = answer.into_body();
        while let Some(frame) = tokio::time::timeout(stall, body.frame()).await.map_err(|_| late())? {
            if let Ok(data) = frame.map_err(|e| broken(e.into()))?.into_data() {
                sink(status, &data).map_err(|e| broken(e.into()))?;
            }
        }
        Ok(status)
    };
    tokio::pin!(exchange);
    tokio::select! {
        done = &mut exchange => done,
        ended = connection => match ended {
            Ok(()) => exchange.await,
            Err(e) => Err(broken(e.into())),
        },
    }
}
