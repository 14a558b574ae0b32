//! One connection: handshake, then one request after the other.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;

use crate::answer;
use crate::head::{self, Head, Incoming};
use crate::log::{Event, Log, Record};
use crate::rule::{Accept, Rule};
use crate::rules::Rules;
use crate::send::{self, End};
use crate::wire::{Wire, until_gone};

/// A handshake may take this long.
const HANDSHAKE: Duration = Duration::from_secs(10);

/// What all connections of a server share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) root: PathBuf,
    pub(crate) rules: Rules,
    pub(crate) log: Log,
}

/// Serves a connection until its end.
pub(crate) async fn serve(
    shared: Arc<Shared>,
    mut tcp: TcpStream,
    tls: Option<TlsAcceptor>,
    peer: SocketAddr,
    number: u64,
) {
    if let Some((rule, accept)) = shared.rules.for_connection() {
        let mut record = Record::of_connection(Event::Accept, number, peer);
        record.rule = Some(rule);
        shared.log.begin(&mut record);
        turn_away(&mut tcp, accept).await;
        shared.log.finish(&mut record);
        return;
    }
    // Drips are to leave as they are written.
    let _ = tcp.set_nodelay(true);
    let Some(tls) = tls else { return converse(&shared, &mut tcp, peer, number).await };
    // The socket of a failed handshake is held until that is in the log: whoever sees it closed finds it there.
    let (problem, _socket) = match timeout(HANDSHAKE, tls.accept(tcp).into_fallible()).await {
        Ok(Ok(mut stream)) => return converse(&shared, &mut stream, peer, number).await,
        Ok(Err((problem, socket))) => (problem.to_string(), Some(socket)),
        Err(_) => ("the handshake was not finished in time".to_owned(), None),
    };
    let mut record = Record::of_connection(Event::Handshake, number, peer);
    record.problem = Some(problem);
    shared.log.begin(&mut record);
    shared.log.finish(&mut record);
}

/// What a rule for connections wants.
async fn turn_away(tcp: &mut TcpStream, accept: Accept) {
    let end = match accept {
        Accept::Hang => {
            until_gone(tcp, &mut Vec::new()).await;
            End::Abrupt
        }
        Accept::Close => End::Close,
        Accept::Reset => End::Reset,
        Accept::Garbage => {
            let _ = tcp.write_all(b"\x01\x02\xff this is neither TLS nor HTTP\r\n\r\n").await;
            End::Close
        }
    };
    send::end(tcp, end).await;
}

async fn converse(shared: &Shared, wire: &mut dyn Wire, peer: SocketAddr, number: u64) {
    let mut inbox = Vec::new();
    let end = loop {
        match head::read(wire, &mut inbox).await {
            Ok(Incoming::Request(head)) => {
                let end = one(shared, wire, &mut inbox, &head, Record::of_request(&head, number, peer)).await;
                if end != End::KeepAlive {
                    break end;
                }
            }
            Ok(Incoming::Refused(status, why)) => {
                let mut record = Record::of_connection(Event::Request, number, peer);
                (record.status, record.problem) = (status, Some(why.to_owned()));
                shared.log.begin(&mut record);
                let answer = answer::refusal(status, why);
                let sent = send::send(wire, &mut inbox, answer, &Rule::default(), |_| {}).await;
                shared.log.finish(&mut record);
                break sent.unwrap_or(End::Abrupt);
            }
            Ok(Incoming::Nothing) => break End::Close,
            Err(_) => break End::Abrupt,
        }
    };
    send::end(wire, end).await;
}

/// Answers one request.
async fn one(
    shared: &Shared,
    wire: &mut dyn Wire,
    inbox: &mut Vec<u8>,
    head: &Head,
    mut record: Record,
) -> End {
    record.rule = shared.rules.for_request(head);
    shared.log.begin(&mut record);
    let rule = record.rule.clone().unwrap_or_default();
    let mut answer = answer::to(head, &shared.root, &rule, record.number);
    // The body of a request is not read; where it ends is not known.
    answer.close |= record.header("content-length").is_some_and(|length| length != "0")
        || record.header("transfer-encoding").is_some();
    record.status = answer.status;
    shared.log.update(&record);
    let mut total = 0;
    let ended = send::send(wire, inbox, answer, &rule, |sent| {
        total = sent;
        shared.log.sent(record.number, sent);
    })
    .await;
    record.sent = total;
    record.problem = ended.as_ref().err().map(io::Error::to_string);
    shared.log.finish(&mut record);
    ended.unwrap_or(End::Abrupt)
}
