//! `checksums.txt`, good and in every form that must be refused; and archives that are not the published ones.

use kit::Rule;
use kit::release::{Archive, Checksums, Release, archive_name};

use crate::world::{World, alone, exact, from_disk, script};

/// What an installation from a form of `checksums.txt` comes to: nothing wrong, or a reason and a part of the text.
type Expected = Option<(&'static str, &'static str)>;

const FORMS: [(Checksums, Expected); 19] = [
    (Checksums::Good, None),
    (Checksums::WithoutNewline, None),
    (Checksums::Empty, Some(("checksums", "has no line for"))),
    (Checksums::Missing, Some(("checksums", "has no line for"))),
    (Checksums::Twice, Some(("checksums", "has more than one line for"))),
    (Checksums::Contradicting, Some(("checksums", "has more than one line for"))),
    (Checksums::Wrong, Some(("checksum_mismatch", "and checksums.txt says"))),
    (Checksums::UpperCase, Some(("checksums", "not 64 lower-case hex digits"))),
    (Checksums::Star, Some(("checksums", "not 64 lower-case hex digits, two spaces"))),
    (Checksums::Crlf, Some(("checksums", "not 64 lower-case hex digits"))),
    (Checksums::LongerName, Some(("checksums", "has no line for"))),
    (Checksums::NameInDirectory, Some(("checksums", "has no line for"))),
    (Checksums::TooShort, Some(("checksums", "not 64 lower-case hex digits"))),
    (Checksums::TooLong, Some(("checksums", "not 64 lower-case hex digits"))),
    (Checksums::NotHex, Some(("checksums", "not 64 lower-case hex digits"))),
    (Checksums::Bsd, Some(("checksums", "not 64 lower-case hex digits"))),
    (Checksums::Bom, Some(("checksums", "not 64 lower-case hex digits"))),
    (Checksums::Huge, Some(("missing", "longer than 262144 bytes"))),
    (Checksums::Html, Some(("checksums", "has no line for"))),
];

fn release(checksums: Checksums) -> Release {
    Release::new("1.4.0").archive(Archive::new().file("ployzd", script("1.4.0"))).checksums(checksums)
}

#[test]
fn exactly_one_line_for_the_exact_name() {
    let alone = alone();
    for (form, expected) in FORMS {
        for network in [false, true] {
            let world = World::new(&alone);
            std::fs::write(world.host.installed(), "what runs here").unwrap();
            let published = release(form).publish(world.site()).unwrap();
            let request = if network { exact("1.4.0") } else { from_disk("1.4.0", &published) };
            let what = format!("{form:?}, network: {network}");
            match expected {
                None => assert_eq!(world.installed(&request).switched.len(), 3, "{what}"),
                // Over the network it is not even taken in.
                Some(("missing", _)) if network => {
                    let refused = world.refused(&request);
                    assert!(refused.contains("bytes, more than 262144"), "{what}: {refused}");
                }
                Some((reason, text)) => {
                    let (found, error) = world.failed(&request);
                    assert_eq!(found, reason, "{what}: {error}");
                    assert!(error.contains(text), "{what}: {error}");
                }
            }
        }
    }
}

#[test]
fn without_checksums_nothing_is_installed() {
    let alone = alone();
    let world = World::new(&alone);
    let published = release(Checksums::Absent).publish(world.site()).unwrap();
    let (reason, error) = world.failed(&from_disk("1.4.0", &published));
    assert_eq!(reason, "missing", "{error}");
    assert!(error.contains("checksums.txt"), "{error}");
    let refused = world.refused(&exact("1.4.0"));
    assert!(refused.contains("checksums.txt does not exist (status 404)"), "{refused}");
}

#[test]
fn one_wrong_byte_anywhere_is_a_mismatch() {
    let alone = alone();
    let world = World::new(&alone);
    world.release("1.3.0");
    world.installed(&exact("1.3.0"));
    let published = release(Checksums::Good).publish(world.site()).unwrap();
    for at in [0, published.length / 2, published.length - 1] {
        world.server.set_rules(vec![Rule::new("*.tar.gz").flip(at)]);
        let (reason, error) = world.failed(&exact("1.4.0"));
        assert_eq!(reason, "checksum_mismatch", "{error}");
        for named in [&archive_name(), &published.sha256] {
            assert!(error.contains(named), "{error}");
        }
    }
    world.server.set_rules(vec![Rule::new("*.tar.gz").body("")]);
    assert_eq!(world.failed(&exact("1.4.0")).0, "checksum_mismatch");
    world.server.set_rules(Vec::new());
    world.installed(&exact("1.4.0"));
}

#[test]
fn an_archive_here_has_its_published_name() {
    let alone = alone();
    let world = World::new(&alone);
    let published = release(Checksums::Good).publish(world.site()).unwrap();
    let request = |name: &str| {
        let mut request = from_disk("1.4.0", &published);
        let renamed = published.directory.join(name);
        let _ = std::fs::copy(&published.archive, &renamed);
        request.local.as_mut().unwrap().0 = renamed;
        request
    };
    for name in ["ployzd.tar.gz", "ployz_linux_amd64.tar.gz", "ployzd_linux_riscv64.tar.gz"] {
        let (reason, error) = world.failed(&request(name));
        assert_eq!(reason, "archive_name", "{error}");
        assert!(error.contains(name) && error.contains(&archive_name()), "{error}");
    }
    std::fs::remove_file(&published.archive).unwrap();
    let (reason, error) = world.failed(&from_disk("1.4.0", &published));
    assert_eq!(reason, "missing", "{error}");
    std::fs::create_dir(&published.archive).unwrap();
    let (_, error) = world.failed(&from_disk("1.4.0", &published));
    assert!(error.contains("not a regular file"), "{error}");
}
