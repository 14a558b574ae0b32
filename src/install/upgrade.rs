//! Asking for an upgrade without being root: what the daemon does of it. It resolves, once, what is wanted to one exact
//! release that exists, and asks at the door; what happens then is the worker's, and can be read in the record.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::door::{self, Asked};
pub use super::door::{Answer, DoorError};
use super::events::Refusal;
use super::preflight::Problem;
use super::release::{Channel, Version};
use super::source::Settings;
use super::{Unresolved, Wanted};
use crate::host::Host;
use crate::interrupt::Interrupt;

/// For the door's answer: a worker's start, its own copy, and the record on disk.
const DOOR: Duration = Duration::from_secs(30);

/// Which release is wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Selection {
    /// This version.
    Exact(Version),
    /// What a channel points to.
    Channel(Channel),
}

/// One exact release that exists. Made by [`resolve`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Target {
    /// Its version.
    pub version: Version,
    /// The channel that it was resolved from.
    pub channel: Option<Channel>,
}

/// Makes one exact release of what is wanted, and looks that the source has it. Blocks for as long as the settings'
/// deadline for pointers allows.
///
/// # Errors
/// Nothing was asked of anyone who could accept it.
pub fn resolve(
    host: &Host,
    own_version: Version,
    selection: Selection,
    interrupt: &Interrupt,
) -> Result<Target, Unresolved> {
    let settings = Settings::read(host).map_err(|e| {
        Unresolved::Refused(Problem::new(e.to_string(), "let root correct the file, or remove it"))
    })?;
    let wanted = match selection {
        Selection::Exact(version) => Wanted::Exact(version),
        Selection::Channel(channel) => Wanted::Channel(channel),
    };
    let (version, _) = super::select(host, &settings, wanted, None, own_version, interrupt)?;
    super::published(host, &settings, version, interrupt)?;
    let channel = match selection {
        Selection::Channel(channel) => Some(channel),
        Selection::Exact(_) => None,
    };
    Ok(Target { version, channel })
}

/// Asks at the door, under this id.
///
/// # Errors
/// No answer came. Whether the request was accepted can then be seen by looking the id up.
pub async fn ask(host: &Host, attempt: &str, target: Target) -> Result<Answer, DoorError> {
    let asked = Asked { attempt: attempt.to_owned(), version: target.version, channel: target.channel };
    door::ask(&host.door(), &asked, DOOR).await
}

impl From<Unresolved> for Refusal {
    fn from(unresolved: Unresolved) -> Self {
        let (Unresolved::NoSuchRelease(problem)
        | Unresolved::Unreachable(problem)
        | Unresolved::Refused(problem)) = unresolved;
        Self::Refused(vec![problem])
    }
}
