//! Root's settings: whom to trust, which proxy, what is refused by name.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::mpsc;
use std::thread;

use kit::{Event, Tls};
use serde_json::json;

use crate::world::{World, alone, exact, version};

#[test]
fn what_is_wrong_is_refused_by_name() {
    let alone = alone();
    for (text, named) in [
        ("{", "EOF while parsing"),
        ("[]", "invalid"),
        ("", "EOF while parsing"),
        (r#"{"schema":1,"relaeses":"https://mirror"}"#, "unknown field `relaeses`"),
        (r#"{"schema":7}"#, "schema 7 is not known"),
        (r#"{"releases":"http://mirror"}"#, r#"releases: "http://mirror" is not https"#),
        (r#"{"channels":"ftp://mirror"}"#, r#"channels: "ftp://mirror" is not an https URL"#),
        (r#"{"channels":"mirror"}"#, r#"channels: "mirror" is not a URL"#),
        (r#"{"releases":"https://m/?x=1"}"#, "without query or fragment"),
        (r#"{"ca_file":"/nonexistent/ca.pem"}"#, "ca_file: reading"),
        (r#"{"deadlines":{"acquire":0}}"#, "deadlines: acquire is 0 s"),
        (r#"{"deadlines":{"aquire":3}}"#, r#"unknown field "aquire""#),
        (r#"{"confirm_window":1000}"#, "confirm_window is 1000 s"),
        (r#"{"floor":"latest"}"#, r#""latest" is not a version"#),
        (r#"{"signing_key":"RWQ"}"#, "signing_key is not a minisign public key"),
        (r#"{"allow_http":"yes"}"#, "invalid type"),
    ] {
        let world = World::new(&alone);
        let published = world.release("1.4.0");
        world.settings_text(text);
        for request in [exact("1.4.0"), crate::world::from_disk("1.4.0", &published)] {
            let refused = world.refused(&request);
            assert!(
                refused.contains(named) && refused.contains("etc/ployz/install.json"),
                "{text}: {refused}"
            );
        }
        assert!(world.server.requests().is_empty() && !world.host.install_state().exists(), "{text}");
    }
}

#[test]
fn an_untrusted_certificate_is_named_and_not_tried_again() {
    let alone = alone();
    for (tls, named) in [
        (Tls::UnknownIssuer, "UnknownIssuer"),
        (Tls::Expired, "expired"),
        (Tls::NotYetValid, "not valid yet"),
        (Tls::WrongName, "elsewhere.ployz.test"),
    ] {
        let world = World::over(&alone, tls);
        world.release("1.4.0");
        let refused = world.refused(&exact("1.4.0"));
        assert!(refused.contains("certificate") && refused.contains(named), "{tls:?}: {refused}");
        let tried =
            world.server.records().into_iter().filter(|record| record.event == Event::Handshake).count();
        assert!(tried <= 1, "{tls:?}: {tried} tries");
        assert!(world.server.requests().is_empty() && !world.host.install_state().exists(), "{tls:?}");
    }
}

#[test]
fn only_roots_own_authority_is_added() {
    let alone = alone();
    let world = World::new(&alone);
    world.release("1.4.0");
    world.settings(&json!({"ca_file": null}));
    let refused = world.refused(&exact("1.4.0"));
    assert!(refused.contains("UnknownIssuer"), "{refused}");
    let ca = world.root().join("other.pem");
    for (text, named) in [
        ("", "ca_file holds no certificate"),
        ("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", "ca_file"),
    ] {
        std::fs::write(&ca, text).unwrap();
        world.settings(&json!({"ca_file": ca}));
        let refused = world.refused(&exact("1.4.0"));
        assert!(refused.contains(named), "{refused}");
    }
}

#[test]
fn http_only_where_root_allows_it() {
    let alone = alone();
    let world = World::over(&alone, Tls::Plain);
    world.release("1.4.0");
    let refused = world.refused(&exact("1.4.0"));
    assert!(refused.contains("is not https (allow_http permits it)"), "{refused}");
    world.settings(&json!({"allow_http": true}));
    world.installed(&exact("1.4.0"));
}

#[test]
fn the_oldest_version_is_roots_choice() {
    let alone = alone();
    let world = World::new(&alone);
    for target in ["1.4.0", "1.5.0"] {
        world.release(target);
    }
    world.settings(&json!({"floor": "1.5.0-beta.2"}));
    let refused = world.refused(&exact("1.4.0"));
    assert!(refused.contains("1.4.0 is older than 1.5.0-beta.2"), "{refused}");
    assert_eq!(world.installed(&exact("1.5.0")).target, Some(version("1.5.0")));
}

#[test]
fn every_download_goes_through_roots_proxy() {
    let alone = alone();
    let world = World::new(&alone);
    world.release("1.4.0");
    let (proxy, asked) = proxy();
    world.settings(&json!({"proxy": proxy}));
    world.installed(&exact("1.4.0"));
    let target = format!("CONNECT {} HTTP/1.1", world.server.address());
    let asked: Vec<_> = asked.try_iter().collect();
    assert_eq!(asked, [target.clone(), target], "checksums and archive");
}

/// A proxy that does as it is told, and a list of what it was told.
fn proxy() -> (String, mpsc::Receiver<String>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let (told, asked) = mpsc::channel();
    thread::spawn(move || {
        for client in listener.incoming() {
            let mut client = client.unwrap();
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                let mut byte = [0];
                client.read_exact(&mut byte).unwrap();
                head.push(byte[0]);
            }
            let line = String::from_utf8(head).unwrap().lines().next().unwrap().to_owned();
            let server = TcpStream::connect(line.split(' ').nth(1).unwrap()).unwrap();
            told.send(line).unwrap();
            client.write_all(b"HTTP/1.1 200 Connection established\r\n\r\n").unwrap();
            let ends = [(client.try_clone(), server.try_clone()), (Ok(server), Ok(client))];
            for (from, to) in ends {
                let (mut from, mut to) = (from.unwrap(), to.unwrap());
                thread::spawn(move || {
                    let _ = std::io::copy(&mut from, &mut to);
                    let _ = to.shutdown(std::net::Shutdown::Write);
                });
            }
        }
    });
    (url, asked)
}
