//! Every reader of bytes that are not ours, or that another release wrote, and what must hold of whatever it accepts.
//!
//! No part of what is shipped: tests give these readers the kept corpus (`qualification/fuzz/corpus`, a folder a
//! reader), and `qualification/fuzz/run` gives them what libFuzzer makes of it. A property that does not hold is a
//! failed assertion, whatever the input was.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "what does not hold must stop the run")]

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use flate2::Compression;
use flate2::write::GzEncoder;
use minisign_verify::PublicKey;
use reqwest::Url;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::archive::{Archive, Incoming, Sums, find_checksum};
use super::attempt::is_id;
use super::door;
use super::installed::Inventory;
use super::preflight::read_about;
use super::records::{self, Entry};
use super::release::{Channel, PointerError, Version, archive_name, read_pointer};
use super::source::Settings;
use super::units;
use crate::durable::sha256_file;
use crate::host::Host;

/// A reader, under test.
#[derive(Debug)]
pub struct Reader {
    /// The name of its folder in the corpus.
    pub name: &'static str,
    /// Gives it an input, and an empty directory that it may fill; fails when a property does not hold.
    pub check: fn(&[u8], &Path),
}

/// All of them. One more is a line here, a function below, and a folder of its name in the corpus.
pub const READERS: &[Reader] = &[
    Reader { name: "about", check: about },
    Reader { name: "archive", check: archive },
    Reader { name: "checksums", check: checksums },
    Reader { name: "door", check: door_line },
    Reader { name: "installed", check: installed },
    Reader { name: "members", check: members },
    Reader { name: "record", check: record },
    Reader { name: "settings", check: settings },
    Reader { name: "signature", check: signature },
    Reader { name: "units", check: unit_files },
    Reader { name: "version", check: version },
];

/// What an archive may unpack to here: so little that a short input can exceed it.
const MOST: u64 = 4 * 1024;
/// The signer of the signature in the corpus, and what it has signed: the secret key is 32 bytes of 1.
const KEY: &str = "RWQBAQEBAQEBAYqI4910CfGV/VLbLTy6XXLKZwm/HZQSG/N0iAG0D29c";
const SIGNED: &[u8] = b"signed\n";

/// A line at the upgrade door, and the same with a field that nobody may name.
fn door_line(input: &[u8], _: &Path) {
    let Ok(asked) = door::read_request(input) else { return };
    assert!(is_id(&asked.attempt), "its id is a file's name: {:?}", asked.attempt);
    let line = serde_json::to_vec(&asked).expect("writing it");
    assert!(line.len() < door::MOST_REQUEST, "it is longer than what may be asked");
    assert_eq!(door::read_request(&line).expect("reading it again"), asked);
    let mut more: serde_json::Value = serde_json::from_slice(input).expect("it was read");
    more["url"] = "https://example.test/".into();
    assert!(door::read_request(more.to_string().as_bytes()).is_err(), "a source may be named");
}

/// Reads, and gives what comes out to the writer and the reader again: it must be the same.
fn stays<T: Serialize + DeserializeOwned + PartialEq + std::fmt::Debug>(value: &T) {
    let text = serde_json::to_vec_pretty(value).expect("what was read can be written");
    let again: T = serde_json::from_slice(&text).expect("what was written can be read");
    assert_eq!(*value, again, "written and read again");
}

/// A version, and a channel's pointer.
fn version(bytes: &[u8], _: &Path) {
    if let Ok(text) = std::str::from_utf8(bytes) {
        if let Ok(version) = text.parse::<Version>() {
            assert_eq!(version.to_string(), text, "one text for one version");
            stays(&version);
        }
        if let Ok(channel) = text.parse::<Channel>() {
            assert_eq!(channel.to_string(), text);
        }
    }
    let line = String::from_utf8_lossy(bytes);
    let line = line.trim();
    let installed = Version { major: 1, minor: 4, patch: 0, beta: None };
    for (channel, installed) in
        [(Channel::Stable, None), (Channel::Stable, Some(installed)), (Channel::Beta, Some(installed))]
    {
        match read_pointer(channel, 1, installed, bytes) {
            Ok(found) => {
                assert_eq!(line.strip_prefix('v').unwrap_or(line), found.to_string(), "no other text is it");
                assert_eq!(found.major, 1);
                assert!(channel == Channel::Beta || found.beta.is_none(), "{found} is no stable release");
                assert!(installed.is_none_or(|installed| found >= installed), "{found} is older");
            }
            Err(PointerError::Grammar { seen, .. }) => assert!(seen.chars().count() <= 40),
            Err(_) => {}
        }
    }
}

/// `checksums.txt`.
fn checksums(bytes: &[u8], _: &Path) {
    let name = archive_name("amd64");
    let Ok(digest) = find_checksum(bytes, &name) else { return };
    assert!(digest.len() == 64 && digest.bytes().all(|b| b"0123456789abcdef".contains(&b)), "{digest:?}");
    let exact = format!("{digest}  {name}");
    let text = std::str::from_utf8(bytes).expect("what is no text has no checksum");
    let exactly = text.split('\n').filter(|line| **line == exact).count();
    assert_eq!(exactly, 1, "one line, and that is it");
    // Every form that a tool for checksums knows has the name between these.
    let edge = |c: Option<char>| c.is_none_or(|c| c.is_whitespace() || "*()".contains(c));
    let named = text.match_indices(name.as_str()).filter(|(at, _)| {
        edge(text[..*at].chars().next_back()) && edge(text[at + name.len()..].chars().next())
    });
    assert_eq!(named.count(), 1, "no other line means the name");
}

/// The signature of `checksums.txt`.
fn signature(bytes: &[u8], _: &Path) {
    let key = PublicKey::from_base64(KEY).expect("the key of the corpus");
    let sums = Sums { checksums: SIGNED.to_vec(), signature: Some(bytes.to_vec()) };
    if sums.check_signature(&key).is_err() {
        return;
    }
    // Nobody else has the secret key: but for the comment that nobody signs, these are the bytes that it wrote.
    let lines = |text: &'static str| text.lines().skip(1).map(str::to_owned).collect::<Vec<_>>();
    let text = std::str::from_utf8(bytes).expect("what is no text is no signature");
    let seen: Vec<_> = text.lines().skip(1).take(3).map(str::to_owned).collect();
    assert_eq!(seen, lines(SIGNATURE), "a forgery");
    let other = Sums { checksums: b"others\n".to_vec(), ..sums };
    assert!(other.check_signature(&key).is_err(), "it signs anything");
}

/// The one good signature.
const SIGNATURE: &str = include_str!("../../qualification/fuzz/corpus/signature/good");

/// The whole `.tar.gz`.
fn archive(bytes: &[u8], directory: &Path) {
    let _ = extracted(bytes, directory);
}

/// What is in one: the input is the tar, which is compressed here, so that libFuzzer need not guess a checksum.
fn members(bytes: &[u8], directory: &Path) {
    let mut packed = GzEncoder::new(Vec::new(), Compression::fast());
    packed.write_all(bytes).expect("writing to memory");
    let packed = packed.finish().expect("writing to memory");
    let Some(content) = extracted(&packed, directory) else { return };
    assert!(bytes.len() as u64 <= MOST, "it unpacks to more than it may");
    // As a reader would who knows nothing but where things are in a tar.
    let is_it = |at: usize| {
        let member = bytes[at + 512..].get(..content.len());
        bytes[at..].starts_with(b"ployzd\0") && member == Some(content.as_slice())
    };
    let blocks = (0..bytes.len().saturating_sub(511)).step_by(512);
    assert!({ blocks }.any(is_it), "what was extracted is not what the archive holds");
}

/// Extracts; what came out, if anything did. Nothing else may be there afterwards.
fn extracted(bytes: &[u8], directory: &Path) -> Option<Vec<u8>> {
    let inside = directory.join("inside");
    fs::create_dir(&inside).expect("making a directory");
    let (path, target) = (inside.join("archive"), inside.join("next"));
    let archive = taken(bytes, &path).expect("writing an archive");
    let extracted = archive.extract_within(MOST, &target);
    let mut there = vec![inside.clone(), path];
    let content = extracted.ok().map(|digest| {
        let meta = fs::symlink_metadata(&target).expect("what was extracted is there");
        assert!(meta.is_file() && meta.len() <= MOST, "{meta:?}");
        let mode = std::os::unix::fs::PermissionsExt::mode(&meta.permissions());
        assert_eq!(mode & 0o7777, 0o600, "private until it is trusted");
        assert_eq!(sha256_file(&target).expect("reading it"), digest);
        there.push(target.clone());
        fs::read(&target).expect("reading it")
    });
    let mut seen = Vec::new();
    everything(directory, &mut seen);
    seen.sort();
    assert_eq!(seen, there, "and nothing else");
    fs::remove_dir_all(inside).expect("removing a directory");
    content
}

/// An archive as it comes: written, hashed, compared.
fn taken(bytes: &[u8], path: &Path) -> std::io::Result<Archive> {
    let mut incoming = Incoming::create(path)?;
    incoming.take(bytes)?;
    let digest = ring::digest::digest(&ring::digest::SHA256, bytes);
    incoming.finish().verify(&crate::durable::hex(digest.as_ref())).map_err(std::io::Error::other)
}

fn everything(directory: &Path, into: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(directory).expect("listing a directory").flatten() {
        into.push(entry.path());
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            everything(&entry.path(), into);
        }
    }
}

/// The record of an attempt.
fn record(bytes: &[u8], directory: &Path) {
    let path = directory.join("record");
    fs::write(&path, bytes).expect("writing a record");
    match records::read(&path) {
        Ok(Entry::Record(record)) => {
            assert!(is_id(&record.id), "its id is a file's name: {:?}", record.id);
            stays(&*record);
            let text = serde_json::to_vec_pretty(&record).expect("it can be written");
            fs::write(&path, text).expect("writing a record");
            assert_eq!(records::read(&path).expect("reading it again"), Entry::Record(record));
        }
        Ok(Entry::Newer(fields)) => assert!(fields.contains_key("schema")),
        Err(e) => assert!(!e.to_string().is_empty()),
    }
}

/// `installed.json`.
fn installed(bytes: &[u8], directory: &Path) {
    let host = Host::under(directory, directory);
    written(&host.installed_json(), bytes);
    let (inventory, damage) = Inventory::read(&host);
    stays(&inventory);
    if damage.is_some() {
        assert_eq!(inventory, Inventory::default(), "what is damaged describes nothing");
    }
}

/// Root's settings.
fn settings(bytes: &[u8], directory: &Path) {
    let host = Host::under(directory, directory);
    written(&host.settings(), bytes);
    let Ok(settings) = Settings::read(&host) else { return };
    assert!(settings.configured);
    let version = Version { major: 1, minor: 4, patch: 0, beta: None };
    let (releases, channels) = (&settings.releases, &settings.channels);
    for base in [releases, channels] {
        let understood = Url::parse(base).expect("a base");
        assert_eq!(understood.as_str().trim_end_matches('/'), base, "it is kept as it is understood");
    }
    for (base, url) in [
        (releases, settings.checksums_url(version)),
        (releases, settings.signature_url(version)),
        (releases, settings.archive_url(version, "amd64")),
        (channels, settings.pointer_url(1, Channel::Stable)),
    ] {
        let (base, url) = (Url::parse(base).expect("a base"), Url::parse(&url).expect("a URL"));
        assert!(url.scheme() == "https" || settings.allow_http && url.scheme() == "http", "{url}");
        assert_eq!((url.host(), url.port()), (base.host(), base.port()), "{url}");
        assert!(url.username().is_empty() && url.password().is_none(), "{url}");
        assert!(url.query().is_none() && url.fragment().is_none(), "{url}");
        assert!(url.path().starts_with(base.path().trim_end_matches('/')), "{url}");
    }
    let deadlines = settings.deadlines;
    for deadline in [
        deadlines.pointer,
        deadlines.stall,
        deadlines.acquire,
        deadlines.preflight,
        deadlines.systemctl,
        deadlines.confirm,
        deadlines.packages,
    ] {
        assert!((1..=3600).contains(&deadline.as_secs()), "{deadline:?}");
    }
    assert!(deadlines.window <= Duration::from_secs(120));
}

/// What a binary says of its units (`units --json`).
fn unit_files(bytes: &[u8], directory: &Path) {
    let Ok(units) = units::read(bytes) else { return };
    assert!((1..=32).contains(&units.len()));
    stays(&units);
    let host = Host::under(directory, directory);
    let all: Vec<_> = units.iter().collect();
    for unit in &units {
        let named = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "-@.".contains(c);
        assert!(unit.name.starts_with("ployz") && unit.name.chars().all(named), "{:?}", unit.name);
        assert!(unit.content.len() <= 32 * 1024 && !unit.content.contains('\0'));
        assert_eq!(host.unit(&unit.name).parent(), Some(host.units().as_path()));
        assert_eq!(units.iter().filter(|other| other.name == unit.name).count(), 1);
    }
    for (unit, link) in units::links(&host, &all) {
        let below: Vec<_> = link.strip_prefix(host.admin_units()).expect("below it").components().collect();
        let parts: Vec<_> = below.iter().map(|part| part.as_os_str().to_string_lossy()).collect();
        assert_eq!(parts.len(), 2, "{link:?} is not where links are");
        assert!(parts[0].ends_with(".wants") && parts[1] == unit.name, "{link:?}");
    }
    let _ = (units::loadable(&units), units::kept_running(&units), units::missing_accounts(&host, &units));
}

/// What a binary says of itself (`version --json`).
fn about(bytes: &[u8], _: &Path) {
    match read_about(bytes) {
        Ok(about) => stays(&about),
        Err(refused) => assert!(refused.error.chars().all(|c| !c.is_control()), "{:?}", refused.error),
    }
}

/// Writes a file and the directories above it.
fn written(path: &Path, bytes: &[u8]) {
    fs::create_dir_all(path.parent().expect("a directory")).expect("making a directory");
    fs::write(path, bytes).expect("writing a file");
}

#[cfg(test)]
mod tests {
    use super::*;

    const CORPUS: &str = "qualification/fuzz/corpus";

    #[test]
    fn the_corpus_is_read_and_what_must_hold_holds() {
        for reader in READERS {
            let mut inputs: Vec<_> = fs::read_dir(Path::new(CORPUS).join(reader.name))
                .expect("a folder of the corpus")
                .map(|entry| entry.unwrap().path())
                .collect();
            inputs.sort();
            assert!(inputs.len() >= 3, "{} has no inputs", reader.name);
            for input in inputs {
                let directory = tempfile::tempdir().unwrap();
                let bytes = fs::read(&input).unwrap();
                assert!(bytes.len() <= 16 * 1024, "{input:?} is no small example");
                // A failed assertion says what did not hold; this says of what.
                let checked = std::panic::catch_unwind(|| (reader.check)(&bytes, directory.path()));
                assert!(checked.is_ok(), "{input:?}: see above");
            }
        }
    }

    #[test]
    fn every_folder_of_the_corpus_is_that_of_a_reader() {
        let folders = fs::read_dir(CORPUS).unwrap().map(|entry| entry.unwrap().file_name());
        let mut folders: Vec<_> = folders.map(|name| name.into_string().unwrap()).collect();
        folders.sort();
        assert_eq!(folders, READERS.iter().map(|reader| reader.name).collect::<Vec<_>>());
    }

    /// An input that is refused shows nothing of what must hold of accepted ones.
    #[test]
    fn of_every_reader_the_corpus_has_something_that_is_accepted() {
        let directory = tempfile::tempdir().unwrap();
        let seed = |reader: &str, name: &str| fs::read(Path::new(CORPUS).join(reader).join(name)).unwrap();
        let key = PublicKey::from_base64(KEY).unwrap();
        let sums = Sums { checksums: SIGNED.to_vec(), signature: Some(seed("signature", "good")) };
        sums.check_signature(&key).unwrap();
        assert!(read_about(&seed("about", "good")).is_ok());
        assert!(find_checksum(&seed("checksums", "good"), &archive_name("amd64")).is_ok());
        assert!(door::read_request(&seed("door", "channel")).is_ok());
        assert!(units::read(&seed("units", "good")).is_ok());
        assert_eq!(extracted(&seed("archive", "good"), directory.path()).unwrap(), b"a program\n");
        let host = Host::under(directory.path(), directory.path());
        written(&host.settings(), &seed("settings", "good"));
        assert!(Settings::read(&host).is_ok());
        written(&host.installed_json(), &seed("installed", "good"));
        assert_eq!(Inventory::read(&host).1, None);
        written(&host.installed_json(), &seed("record", "succeeded"));
        assert!(matches!(records::read(&host.installed_json()), Ok(Entry::Record(_))));
    }
}
