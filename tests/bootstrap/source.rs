//! Release sources that are wrong: the pointer, `checksums.txt`, the archive, the connection.

use std::fs;
use std::time::Duration;

use kit::release::{Archive, Checksums, Release, archive_name};
use kit::{Announce, How, Rule, Server, Tls};

use crate::world::{SHELLS, World, enter, wait_until};

const VERSION: &[&str] = &["--version", "1.4.0"];

#[test]
fn a_pointer_is_one_version_of_major_1() {
    let Some(world) = enter!() else { return };
    let long = format!("1.4.0 {}", "x".repeat(500));
    for shell in SHELLS {
        for text in ["1.4.0", "v1.4.0\n", " \r\n\t v1.4.0 \r\n\n"] {
            world.server.set_rules(vec![Rule::new("/v1/stable").body(text)]);
            world.server.forget();
            let ended = world.run(&[]).shell(shell).end();
            assert_eq!(ended.code, 0, "{} {text:?}: {ended:?}", shell.name);
            assert!(ended.err.contains("ployz: stable is 1.4.0\n"), "{ended:?}");
            assert_eq!(world.called().unwrap()[2..4], ["--version", "1.4.0"]);
            assert_eq!(world.server.requests_for("/v1/stable").len(), 1, "a channel is resolved once");
        }
        for (text, seen) in [
            ("", "not a version: \n"),
            ("\n", "not a version: \n"),
            ("v", "not a version: \n"),
            ("1.4", "not a version: 1.4\n"),
            ("1.4.", "not a version: 1.4.\n"),
            ("1.4.0.0", "not a version: 1.4.0.0\n"),
            ("01.4.0", "not a version: 01.4.0\n"),
            ("1.4.00", "not a version: 1.4.00\n"),
            ("1,4,0", "not a version: 1,4,0\n"),
            ("1.4.0-beta", "not a version: 1.4.0-beta\n"),
            ("1.4.0-beta.", "not a version: 1.4.0-beta.\n"),
            ("1.4.0-beta.01", "not a version: 1.4.0-beta.01\n"),
            ("1.4.0-rc.1", "not a version: 1.4.0-rc.1\n"),
            ("1.4.0+7", "not a version: 1.4.0+7\n"),
            ("vv1.4.0", "not a version: v1.4.0\n"),
            ("v 1.4.0", "not a version:  1.4.0\n"),
            ("1.4.0 1.4.0", "not a version: 1.4.0 1.4.0\n"),
            ("1.4.0\n1.4.0\n", "not a version: 1.4.0 1.4.0\n"),
            ("1.\u{0}4.0", "not a version: 1.?4.0\n"),
            ("\u{1b}[31m1.4.0", "not a version: ?[31m1.4.0\n"),
            ("１.4.0", "not a version: ???.4.0\n"),
            ("-n", "not a version: -n\n"),
            ("$(id)", "not a version: $(id)\n"),
            ("nightly", "not a version: nightly\n"),
            ("<html>Not found</html>", "not a version: <html>Not found</html>\n"),
            ("1.5.0-beta.2", "refusing 1.5.0-beta.2 as stable of major 1\n"),
            ("2.0.0", "refusing 2.0.0 as stable of major 1\n"),
            ("0.9.0", "refusing 0.9.0 as stable of major 1\n"),
            ("11.0.0", "refusing 11.0.0 as stable of major 1\n"),
        ] {
            world.server.set_rules(vec![Rule::new("/v1/stable").body(text)]);
            world.run(&[]).shell(shell).refused(4, seen);
        }
        world.server.set_rules(vec![Rule::new("/v1/stable").body(&long)]);
        let seen = format!("not a version: {}\n", &long[..60]);
        world.run(&[]).shell(shell).refused(4, &seen);
        world.server.set_rules(vec![Rule::new("/v1/beta").body("2.0.0-beta.1")]);
        world.run(&["--channel", "beta"]).shell(shell).refused(4, "refusing 2.0.0-beta.1 as beta of major 1");
    }
}

#[test]
fn checksums_name_the_archive_once_and_exactly() {
    let Some(world) = enter!() else { return };
    let site = world.directory.join("site");
    // Every awk that this host has.
    for awk in ["mawk", "gawk", "original-awk", "busybox"].into_iter().filter(|awk| installed(awk)) {
        world.grant("awk", awk);
        for (checksums, words) in [
            (Checksums::Good, None),
            (Checksums::WithoutNewline, None),
            (Checksums::Absent, Some("cannot fetch")),
            (Checksums::Huge, Some("cannot fetch")),
            (Checksums::Wrong, Some("deleted")),
            (Checksums::Empty, Some("not one line")),
            (Checksums::Missing, Some("not one line")),
            (Checksums::Twice, Some("not one line")),
            (Checksums::Contradicting, Some("not one line")),
            (Checksums::UpperCase, Some("not one line")),
            (Checksums::Star, Some("not one line")),
            (Checksums::Crlf, Some("not one line")),
            (Checksums::LongerName, Some("not one line")),
            (Checksums::NameInDirectory, Some("not one line")),
            (Checksums::TooShort, Some("not one line")),
            (Checksums::TooLong, Some("not one line")),
            (Checksums::NotHex, Some("not one line")),
            (Checksums::Bsd, Some("not one line")),
            (Checksums::Bom, Some("not one line")),
            (Checksums::Html, Some("not one line")),
        ] {
            let archive = Archive::new().file("ployzd", "#!/bin/sh\necho ran");
            Release::new("1.4.0").archive(archive).checksums(checksums).publish(&site).unwrap();
            let run = world.run(VERSION);
            let ended = match words {
                Some(words) => run.refused(4, words),
                None => run.end(),
            };
            assert_eq!(ended.code == 0, words.is_none(), "{awk}, {checksums:?}: {ended:?}");
            assert_eq!(ended.out == "ran\n", words.is_none(), "{awk}, {checksums:?}: {ended:?}");
        }
        // Forms of the same name beside the right line.
        let path = site.join("releases/download/v1.4.0");
        let archive = Archive::new().file("ployzd", "#!/bin/sh\necho ran");
        let published = Release::new("1.4.0").archive(archive).publish(&site).unwrap();
        let (sum, name) = (published.sha256, archive_name());
        let right = format!("{sum}  {name}\n");
        for (beside, accepted) in [
            (format!("{sum}  {name}.sig\n{sum}  x{name}\n{sum} {name}x\n"), true),
            (format!("{sum}  {}\n", name.replace('.', "x")), true),
            ("# sums of this release\n\n".to_owned(), true),
            (format!("{sum} *{name}\n"), false),
            (format!("{sum}  {name}\r\n"), false),
            (format!("{}  {name}\n", sum.to_uppercase()), false),
            (format!("{sum} {name}\n"), false),
            (format!("{name}\n"), false),
        ] {
            for text in [format!("{right}{beside}"), format!("{beside}{right}")] {
                fs::write(path.join("checksums.txt"), &text).unwrap();
                let ended = if accepted {
                    world.run(VERSION).end()
                } else {
                    world.run(VERSION).refused(4, "not one line")
                };
                assert_eq!(ended.code == 0, accepted, "{awk}: {text}: {ended:?}");
            }
        }
    }
}

fn installed(tool: &str) -> bool {
    std::path::Path::new("/usr/bin").join(tool).exists() || std::path::Path::new("/bin").join(tool).exists()
}

#[test]
fn other_bytes_than_announced_are_deleted() {
    let Some(world) = enter!() else { return };
    world.server.set_rules(vec![Rule::new("*.tar.gz").flip(40)]);
    let text =
        fs::read_to_string(world.directory.join("site/releases/download/v1.4.0/checksums.txt")).unwrap();
    for shell in SHELLS {
        let ended =
            world.run(VERSION).shell(shell).refused(4, &format!("checksums.txt says {}", &text[..64]));
        let (_, got) = ended.err.split_once("sha256 is ").unwrap();
        assert!(
            got[..64].bytes().all(|byte| byte.is_ascii_hexdigit()) && got[..64] != text[..64],
            "{ended:?}"
        );
    }
}

#[test]
fn whatever_the_archive_holds_one_file_is_written() {
    let Some(world) = enter!() else { return };
    let secret = world.directory.join("secret");
    fs::write(&secret, "#!/bin/sh\necho secret\n").unwrap();
    let secret = secret.to_str().unwrap();
    let climbing = "../../../../../../climbed";
    let good = "#!/bin/sh\necho ran\n";
    for tar in ["tar", "busybox"] {
        world.grant("tar", tar);
        for (what, archive, runs) in [
            ("good", Archive::new().file("ployzd", good), true),
            ("setuid", Archive::new().file_with_mode("ployzd", 0o4755, good), true),
            ("others", Archive::new().file(climbing, "x").file(secret, "x").file("ployzd", good), true),
            ("none", Archive::new().file("ployz", good), false),
            ("empty archive", Archive::new(), false),
            ("empty", Archive::new().file("ployzd", ""), false),
            ("longer name", Archive::new().file("ployzd.sig", good), false),
            ("symlink", Archive::new().symlink("ployzd", secret), false),
            ("hard link", Archive::new().hard_link("ployzd", secret), false),
            ("directory", Archive::new().directory("ployzd"), false),
            ("fifo", Archive::new().fifo("ployzd"), false),
            ("device", Archive::new().device("ployzd"), false),
            ("too large", Archive::new().zeros("ployzd", 300 << 20), false),
        ] {
            world.publish_archive("1.4.0", archive);
            let ended = world.run(VERSION).end();
            let what = format!("{tar}, {what}: {ended:?}");
            assert_eq!((ended.code == 0, ended.out == "ran\n"), (runs, runs), "{what}");
            assert_eq!(ended.err.contains("holds no file ployzd"), !runs, "{what}");
            assert!(runs || ended.code == 4, "{what}");
            assert!(
                world.staged().is_empty() && !std::path::Path::new("/usr/local/climbed").exists(),
                "{what}"
            );
        }
        world.publish_archive("1.4.0", b"\x1f\x8b this is not gzip".as_slice());
        world.run(VERSION).refused(4, "holds no file ployzd");
    }
}

/// Each client alone, by the name that messages give it.
fn with_each_client(world: &World, mut check: impl FnMut(&str)) {
    check("curl");
    world.take_away("curl");
    check("/usr/bin/wget");
    world.grant("curl", "curl");
}

#[test]
fn a_source_that_cannot_prove_its_name_is_refused() {
    let Some(world) = enter!() else { return };
    let site = world.directory.join("site");
    let wgetrc = fs::read_to_string(world.home(".wgetrc")).unwrap();
    // Even where the person's own configuration doesn't care, or hides what the client says.
    for (curlrc, wget_extra) in
        [("", ""), ("insecure\n", "check_certificate = off\nquiet = on\nlogfile = /dev/null\n")]
    {
        fs::write(world.home(".curlrc"), curlrc).unwrap();
        fs::write(world.home(".wgetrc"), format!("{wgetrc}{wget_extra}")).unwrap();
        with_each_client(&world, |client| {
            for tls in [Tls::Expired, Tls::NotYetValid, Tls::WrongName, Tls::UnknownIssuer] {
                let server = Server::start(kit::Options::new(&site).tls(tls)).unwrap();
                let run =
                    world.run(VERSION).env("PLOYZ_RELEASES", &format!("{}/releases/download", server.url()));
                run.refused(4, &format!("({client} "));
                assert!(server.requests().is_empty(), "{client} asked a source that is {tls:?}");
            }
            let plain = Server::start(kit::Options::new(&site).tls(Tls::Plain)).unwrap();
            for path in ["checksums.txt", &archive_name()] {
                let away = format!("{}/releases/download/v1.4.0/{path}", plain.url());
                world.server.set_rules(vec![Rule::new(format!("*/{path}")).redirect(&away)]);
                world.run(VERSION).refused(4, "https");
            }
            world.server.set_rules(Vec::new());
            assert_eq!(world.run(VERSION).end().code, 0, "{client}");
            world.called().unwrap();
        });
    }
}

#[test]
fn mirrors_are_https() {
    let Some(world) = enter!() else { return };
    for shell in SHELLS {
        for (mirror, seen) in [
            ("http://127.0.0.1", "http://127.0.0.1"),
            ("ftp://127.0.0.1", "ftp://127.0.0.1"),
            ("file:///etc", "file:///etc"),
            ("127.0.0.1", "127.0.0.1"),
            ("https://", "https://"),
            ("https:///x", "https:///x"),
            ("HTTP://x", "HTTP://x"),
            ("http://x/S=https://x", "http://x/S=https://x"),
            ("https://x y", "https://x y"),
            ("https://x\ny", "https://x?y"),
            ("https://x\u{1b}[2J", "https://x?[2J"),
        ] {
            for name in ["PLOYZ_RELEASES", "PLOYZ_CHANNELS"] {
                let words = format!("not an https address: {name}={seen}\n");
                world.run(&[]).shell(shell).env(name, mirror).refused(4, &words);
            }
        }
    }
    // Without a mirror; the proxy keeps it from going anywhere.
    with_each_client(&world, |_| {
        let run = |args| world.run(args).env("https_proxy", "http://127.0.0.1:1").env("PLOYZ_RELEASES", "");
        run(&[]).env("PLOYZ_CHANNELS", "").refused(4, "cannot fetch https://ployz.sh/v1/stable (");
        run(VERSION).refused(
            4,
            "cannot fetch https://github.com/getployz/ployz/releases/download/v1.4.0/checksums.txt (",
        );
    });
}

#[test]
fn answers_are_bounded_and_retried() {
    let Some(world) = enter!() else { return };
    with_each_client(&world, |client| {
        let cannot = format!("v1/stable ({client} ");
        for rule in [
            Rule::new("").endless(),
            Rule::new("").endless().announce(Announce::Chunked),
            Rule::new("").endless().announce(Announce::Length(1 << 40)),
            Rule::new("").body(" ".repeat(65537)),
            Rule::new("").redirect_loop(),
            Rule::new("").redirect_chain(6),
            Rule::new("").status(404),
            Rule::new("").status(403),
        ] {
            let refusal = matches!(rule.status, Some(403 | 404));
            world.server.set_rules(vec![Rule { path: "/v1/stable".to_owned(), ..rule }]);
            world.server.forget();
            world.run(&[]).refused(4, &cannot);
            assert!(!refusal || world.server.settled().len() == 1, "{client} asked again after a refusal");
        }
        for rule in [
            Rule::new("*").redirect_chain(5),
            Rule::new("*.gz").times(2).status(503),
            Rule::new("*").times(1).status(429),
        ] {
            world.server.set_rules(vec![rule.clone()]);
            let ended = world.run(&[]).end();
            assert_eq!(ended.code, 0, "{client}, {rule:?}: {ended:?}");
            world.called().unwrap();
        }
        // Fewer bytes than announced are never an archive.
        world.server.set_rules(vec![Rule::new("*.gz").cut(10, How::Close)]);
        world.run(VERSION).refused(4, ".tar.gz (");
    });
}

#[test]
fn a_source_that_drips_is_given_up() {
    let Some(world) = enter!() else { return };
    world.server.set_rules(vec![Rule::new("*").drip(1, Duration::from_secs(5))]);
    let curl = world.run(&[]).start();
    wait_until("curl asks", || world.server.requests().len() == 1);
    world.take_away("curl");
    let wget = world.run(&[]).start();
    for (client, running) in [("curl", curl), ("/usr/bin/wget", wget)] {
        let ended = running.end();
        assert_eq!(ended.code, 4, "{ended:?}");
        assert!(ended.err.contains(&format!("({client} ")) && ended.err.contains("30 s)"), "{ended:?}");
    }
    assert!(world.staged().is_empty());
}
