//! The Machine's identity: an Ed25519 key, the id that is its fingerprint, a name. One versioned file, which only
//! `initialize` makes and only `reset` removes; an upgrade never touches it.

use std::io;
use std::path::PathBuf;

use jiff::Timestamp;
use ring::rand::SystemRandom;
use ring::signature::{Ed25519KeyPair, KeyPair};
use serde::{Deserialize, Serialize};

use crate::durable::{self, hex, read_bounded, sync_parent, write_whole};
use crate::host::{Account, Host};
use crate::install::admission::MutationAdmission;

const SCHEMA: u32 = 1;
const MOST: usize = 64 * 1024;

/// The identity as it is stored.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Identity {
    schema: u32,
    /// `initialized`, or `resetting` from the moment that a reset began.
    phase: StoredPhase,
    /// The first 16 bytes of the sha256 of the public key, in hex.
    pub(crate) id: String,
    /// What the operator calls it.
    pub(crate) name: String,
    /// The public key, in hex.
    pub(crate) public_key: String,
    /// The key pair (PKCS #8), in hex.
    key: String,
    /// When it was made.
    pub(crate) initialized_at: Timestamp,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum StoredPhase {
    Initialized,
    Resetting,
}

/// What there is of an identity.
#[derive(Debug, Clone)]
pub(crate) enum State {
    /// None: `uninitialized`.
    Absent,
    /// This one: `initialized`.
    Present(Box<Identity>),
    /// One that is being removed: `resetting`.
    Resetting,
    /// A file that this release can't read. It is left as it is: only a person can tell what it is worth.
    Damaged(String),
}

/// A name that a Machine may have: 1 to 63 letters, digits, dots and dashes, as a host name.
pub(crate) fn is_name(name: &str) -> bool {
    let edge = |b: Option<u8>| b.is_some_and(|b| b.is_ascii_alphanumeric());
    (1..=63).contains(&name.len())
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'.')
        && edge(name.bytes().next())
        && edge(name.bytes().last())
}

fn path(host: &Host) -> PathBuf {
    host.state().join("identity.json")
}

/// Removes what a crash while the identity was written left. Only the daemon writes it.
pub(crate) fn sweep(host: &Host) {
    durable::sweep(&host.state(), |name| name == "identity.json");
}

/// Reads the identity. Never fails: what can't be read is [`State::Damaged`].
pub(crate) fn read(host: &Host) -> State {
    let path = path(host);
    let text = match read_bounded(&path, MOST) {
        Ok(text) => text,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return State::Absent,
        Err(e) => return State::Damaged(format!("reading {path:?}: {e}")),
    };
    let identity: Identity = match serde_json::from_slice(&text) {
        Ok(identity) => identity,
        Err(e) => return State::Damaged(format!("{path:?} is not an identity: {e}")),
    };
    if identity.schema > SCHEMA {
        return State::Damaged(format!(
            "{path:?} has schema {}, which is newer than this release",
            identity.schema
        ));
    }
    match identity.phase {
        StoredPhase::Resetting => State::Resetting,
        StoredPhase::Initialized => match identity.check() {
            Ok(()) => State::Present(Box::new(identity)),
            Err(problem) => State::Damaged(format!("{path:?} {problem}")),
        },
    }
}

impl Identity {
    /// The id is the key's fingerprint, and the key is a key.
    fn check(&self) -> Result<(), String> {
        let pair = unhex(&self.key).and_then(|der| Ed25519KeyPair::from_pkcs8(&der).ok());
        let pair = pair.ok_or("holds no usable key")?;
        if hex(pair.public_key().as_ref()) != self.public_key
            || fingerprint(pair.public_key().as_ref()) != self.id
        {
            return Err("has an id that is not its key's".into());
        }
        Ok(())
    }

    fn write(&self, host: &Host) -> io::Result<()> {
        let mut text = serde_json::to_vec_pretty(self).map_err(io::Error::other)?;
        text.push(b'\n');
        // The daemon is not privileged: the file is its own by being made by it.
        write_whole(host, &path(host), &text, 0o600, Account { uid: 0, gid: 0 })
    }
}

fn fingerprint(public_key: &[u8]) -> String {
    hex(&ring::digest::digest(&ring::digest::SHA256, public_key).as_ref()[..16])
}

fn unhex(text: &str) -> Option<Vec<u8>> {
    let pairs = text.as_bytes().chunks(2).map(|pair| std::str::from_utf8(pair).ok());
    pairs.map(|pair| u8::from_str_radix(pair?, 16).ok()).collect()
}

/// Makes a new identity and makes it durable.
pub(crate) fn initialize(host: &Host, name: &str, _admission: &MutationAdmission) -> io::Result<Identity> {
    let no_key = |_| io::Error::other("no key could be made");
    let der = Ed25519KeyPair::generate_pkcs8(&SystemRandom::new()).map_err(no_key)?;
    let pair =
        Ed25519KeyPair::from_pkcs8(der.as_ref()).map_err(|_| io::Error::other("no key could be made"))?;
    let identity = Identity {
        schema: SCHEMA,
        phase: StoredPhase::Initialized,
        id: fingerprint(pair.public_key().as_ref()),
        name: name.to_owned(),
        public_key: hex(pair.public_key().as_ref()),
        key: hex(der.as_ref()),
        initialized_at: Timestamp::now(),
    };
    identity.write(host)?;
    Ok(identity)
}

/// Writes that the identity is to be removed: from here on a crash leaves `resetting`, never half an identity.
pub(crate) fn begin_reset(host: &Host, state: &State, _admission: &MutationAdmission) -> io::Result<()> {
    match state {
        State::Present(identity) => {
            Identity { phase: StoredPhase::Resetting, ..(**identity).clone() }.write(host)
        }
        State::Absent | State::Resetting | State::Damaged(_) => Ok(()),
    }
}

/// Removes it.
pub(crate) fn finish_reset(host: &Host, _admission: &MutationAdmission) -> io::Result<()> {
    let path = path(host);
    match std::fs::remove_file(&path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        _ => sync_parent(&path),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]
    use super::*;

    #[test]
    fn names_are_host_names() {
        for good in ["web-1", "a", "db.example", "0x"] {
            assert!(is_name(good), "{good}");
        }
        for bad in ["", "-a", "a-", "a b", "ä", "a/b", &"a".repeat(64)] {
            assert!(!is_name(bad), "{bad}");
        }
    }

    #[test]
    fn an_identity_is_made_read_and_removed() {
        let root = tempfile::tempdir().unwrap();
        let host = Host::under(root.path(), "/nonexistent".as_ref());
        std::fs::create_dir_all(host.state()).unwrap();
        std::fs::create_dir_all(host.install_state()).unwrap();
        std::fs::write(host.admission(), "").unwrap();
        let admission = MutationAdmission::try_take(&host).unwrap();
        assert!(matches!(read(&host), State::Absent));
        let made = initialize(&host, "web-1", &admission).unwrap();
        let State::Present(found) = read(&host) else { panic!("not there") };
        assert_eq!((found.id.as_str(), found.name.as_str()), (made.id.as_str(), "web-1"));
        begin_reset(&host, &State::Present(found), &admission).unwrap();
        assert!(matches!(read(&host), State::Resetting));
        finish_reset(&host, &admission).unwrap();
        assert!(matches!(read(&host), State::Absent));
    }

    #[test]
    fn damage_is_said_and_left() {
        let root = tempfile::tempdir().unwrap();
        let host = Host::under(root.path(), "/nonexistent".as_ref());
        std::fs::create_dir_all(host.state()).unwrap();
        for damaged in ["", "{}", "\0\0\0", r#"{"schema":9}"#, "[1]"] {
            std::fs::write(path(&host), damaged).unwrap();
            assert!(matches!(read(&host), State::Damaged(_)), "{damaged:?}");
            assert_eq!(std::fs::read_to_string(path(&host)).unwrap(), damaged);
        }
    }
}
