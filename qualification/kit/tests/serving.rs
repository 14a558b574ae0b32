//! A server without rules: what any client may expect.

#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use common::{Curl, site};
use kit::{Options, Server, Tls};

#[test]
fn serves_a_file_with_its_length_and_validators() {
    let site = site();
    let server = Server::start(Options::new(site.path())).unwrap();
    let answer = Curl::of(&server).get("/v1/stable");
    assert_eq!((answer.status, answer.body.as_slice()), (200, b"v1.4.0\n".as_slice()));
    assert_eq!(answer.header("content-length"), Some("7"));
    assert_eq!(answer.header("accept-ranges"), Some("bytes"));
    let etag = answer.header("etag").unwrap().to_owned();
    let modified = answer.header("last-modified").unwrap().to_owned();
    for condition in [format!("If-None-Match: {etag}"), format!("If-Modified-Since: {modified}")] {
        assert_eq!(Curl::of(&server).with(["-H", &condition]).get("/v1/stable").status, 304);
    }
    let records = server.settled();
    assert_eq!(records[0].path, "/v1/stable");
    assert_eq!((records[0].status, records[0].sent, records[0].finished), (200, 7, true));
    assert!(records[0].header("User-Agent").unwrap().starts_with("curl/"));
}

#[test]
fn answers_head_without_a_body() {
    let site = site();
    let server = Server::start(Options::new(site.path()).tls(Tls::Plain)).unwrap();
    let answer = Curl::of(&server).with(["--head"]).get("/big");
    assert_eq!((answer.status, answer.header("content-length")), (200, Some("1000000")));
    assert_eq!(server.settled()[0].sent, 0);
}

#[test]
fn answers_ranges() {
    let site = site();
    let server = Server::start(Options::new(site.path())).unwrap();
    let curl = || Curl::of(&server);
    let part = curl().with(["-r", "10-19"]).get("/big");
    assert_eq!((part.status, part.body.len()), (206, 10));
    assert_eq!(part.header("content-range"), Some("bytes 10-19/1000000"));
    assert_eq!(part.body, common::big()[10..20]);
    let rest = curl().with(["-r", "999990-"]).get("/big");
    assert_eq!(rest.body, common::big()[999_990..]);
    assert_eq!(curl().with(["-r", "-5"]).get("/big").body, common::big()[999_995..]);
    let beyond = curl().with(["-r", "1000000-"]).get("/big");
    assert_eq!((beyond.status, beyond.header("content-range")), (416, Some("bytes */1000000")));

    let etag = part.header("etag").unwrap();
    let same = curl().with(["-r", "10-19", "-H", &format!("If-Range: {etag}")]).get("/big");
    assert_eq!(same.status, 206);
    let other = curl().with(["-r", "10-19", "-H", "If-Range: \"other\""]).get("/big");
    assert_eq!((other.status, other.body.len()), (200, 1_000_000));
    assert_eq!(server.settled()[0].range.as_deref(), Some("bytes=10-19"));
}

#[test]
fn keeps_the_connection() {
    let site = site();
    let server = Server::start(Options::new(site.path())).unwrap();
    let (one, two) = (format!("{}/v1/stable", server.url()), format!("{}/nothing", server.url()));
    let answer = Curl::of(&server).with([one.as_str(), two.as_str()]).get("/v1/stable");
    assert_eq!(answer.exit, 0);
    let connections: Vec<_> = server.settled().iter().map(|record| record.connection).collect();
    assert_eq!(connections, [1, 1, 1]);
}

#[test]
fn serves_many_at_once() {
    let site = site();
    let server = Server::start(Options::new(site.path())).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..16 {
            scope.spawn(|| assert_eq!(Curl::of(&server).get("/big").body, common::big()));
        }
    });
    assert_eq!(server.settled().len(), 16);
}

#[test]
fn refuses_what_is_not_a_request() {
    let site = site();
    let server = Server::start(Options::new(site.path()).tls(Tls::Plain)).unwrap();
    for (sent, status) in [
        ("GET /../../etc/passwd HTTP/1.1\r\nConnection: close\r\n\r\n".to_owned(), 400),
        ("GET /%2e%2e/%2e%2e/etc/passwd HTTP/1.1\r\nConnection: close\r\n\r\n".to_owned(), 400),
        ("GET /v1/..%2f..%2fetc/passwd HTTP/1.1\r\nConnection: close\r\n\r\n".to_owned(), 400),
        ("nonsense\r\n\r\n".to_owned(), 400),
        ("GET / HTTP/2.0\r\n\r\n".to_owned(), 505),
        ("POST /v1/stable HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello".to_owned(), 405),
        (format!("GET / HTTP/1.1\r\nX: {}\r\n\r\n", "a".repeat(40_000)), 431),
    ] {
        let answer = common::raw(&server, &sent);
        let line = String::from_utf8_lossy(&answer);
        assert!(line.starts_with(&format!("HTTP/1.1 {status} ")), "{sent:.40} was answered {line:.60}");
    }
}

#[test]
fn listens_nowhere_else() {
    let site = site();
    let mut options = Options::new(site.path());
    options.listen = "0.0.0.0:0".parse().unwrap();
    let problem = Server::start(options).unwrap_err().to_string();
    assert_eq!(problem, "refusing to listen on 0.0.0.0:0: neither loopback nor lab");
}

#[test]
fn comes_back_on_the_same_port() {
    let site = site();
    let mut options = Options::new(site.path());
    let server = Server::start(options.clone()).unwrap();
    assert_eq!(Curl::of(&server).get("/v1/stable").status, 200);
    options.listen = server.address();
    drop(server);
    let server = Server::start(options).unwrap();
    assert_eq!(Curl::of(&server).get("/v1/stable").status, 200);
}

#[test]
fn certificates_are_wrong_in_one_way_each() {
    let site = site();
    for (tls, words) in [
        (Tls::Expired, "expired"),
        (Tls::NotYetValid, "not yet valid"),
        (Tls::WrongName, "no alternative certificate subject name"),
        (Tls::UnknownIssuer, "unable to get local issuer"),
    ] {
        let server = Server::start(Options::new(site.path()).tls(tls)).unwrap();
        let answer = Curl::of(&server).get("/v1/stable");
        assert_eq!(answer.exit, 60, "{tls:?}");
        assert!(answer.says.contains(words), "{tls:?}: {}", answer.says);
        assert!(server.requests().is_empty());
    }
    let server = Server::start(Options::new(site.path())).unwrap();
    let port = server.address().port();
    for name in ["localhost", "releases.ployz.test"] {
        let resolve = format!("{name}:{port}:127.0.0.1");
        let answer = Curl::to(&format!("https://{name}:{port}"), &server)
            .with(["--resolve", &resolve])
            .get("/v1/stable");
        assert_eq!(answer.status, 200, "{name}: {}", answer.says);
    }
}
