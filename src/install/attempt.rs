//! An attempt: what was asked, how far it came, what is installed now, how it ended, and the state that a reader
//! derives from that and from what it sees of the Machine. Where it is kept: [`super::records`].

use std::fmt;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::admission::Observed;
use super::records;
use super::release::{Channel, Version};
use super::staging::SCOPE_PREFIX;
use crate::host::Host;

/// The schema of the records that this release writes.
pub(super) const SCHEMA: u32 = 1;

/// How far an attempt has come. A stage of another release's making is shown as it is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", from = "String")]
pub enum Stage {
    /// The record is durable; nothing was done yet.
    Accepted,
    /// Accounts and directories.
    Preparing,
    /// Fetching.
    Acquiring,
    /// Comparing checksums.
    Verifying,
    /// Extracting, and running the new binary before anything is replaced.
    Preflight,
    /// Renaming.
    Activating,
    /// Restarting what runs a replaced executable.
    Restarting,
    /// Observing that it runs.
    Confirming,
    /// One that this release does not know.
    Other(String),
}

const STAGES: [(Stage, &str); 8] = [
    (Stage::Accepted, "accepted"),
    (Stage::Preparing, "preparing"),
    (Stage::Acquiring, "acquiring"),
    (Stage::Verifying, "verifying"),
    (Stage::Preflight, "preflight"),
    (Stage::Activating, "activating"),
    (Stage::Restarting, "restarting"),
    (Stage::Confirming, "confirming"),
];

impl From<String> for Stage {
    fn from(text: String) -> Self {
        STAGES.iter().find(|(_, name)| *name == text).map_or(Self::Other(text), |(stage, _)| stage.clone())
    }
}

impl From<Stage> for String {
    fn from(stage: Stage) -> Self {
        stage.to_string()
    }
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Other(text) => f.write_str(text),
            known => {
                f.write_str(STAGES.iter().find(|(stage, _)| stage == known).map_or("", |(_, name)| name))
            }
        }
    }
}

/// What was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Requested {
    /// This version.
    Exact(Version),
    /// What a channel pointed to, when it was resolved.
    Channel(Channel),
    /// The executable that was run.
    Itself,
}

/// Whether the installation was changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Installation {
    /// Nothing was.
    Unchanged,
    /// At least one file was switched.
    Replaced,
}

/// How an attempt ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// The target was observed to run, ready, and to stay so.
    Succeeded {
        /// The version that answered.
        version: Version,
        /// The process that answered.
        pid: u32,
        /// The digest of the installed executable.
        sha256: String,
        /// Whether the target was running already, so that nothing was replaced or restarted.
        nothing_was_needed: bool,
    },
    /// Everything is in place and nothing was started, as asked (`--installation-only`).
    Installed {
        /// The version in place.
        version: Version,
        /// The digest of the installed executable.
        sha256: String,
    },
    /// It did not work.
    Failed {
        /// Where.
        stage: Stage,
        /// A stable word for programs.
        reason: String,
        /// What was observed.
        error: String,
        /// What lies behind it, outermost first.
        causes: Vec<String>,
        /// What to do next, a line each.
        #[serde(default)]
        help: Vec<String>,
    },
    /// It ended before it had an outcome.
    Interrupted {
        /// Where.
        stage: Stage,
        /// How that is known.
        evidence: String,
    },
}

/// The record of one attempt.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// Of the format.
    pub schema: u32,
    /// 32 hex digits.
    pub id: String,
    /// Grows with every attempt, whatever the clock does.
    #[serde(default)]
    pub sequence: u64,
    /// `install`, `upgrade`, `recover`.
    pub kind: String,
    /// What was asked for.
    pub requested: Requested,
    /// The exact release that it is about, once known.
    pub target: Option<Version>,
    /// The digest of the target's executable, known before the first rename.
    pub target_digest: Option<String>,
    /// What was installed before.
    pub from: Option<Version>,
    /// The digest of the executable that was in place before, if there was one.
    #[serde(default)]
    pub from_digest: Option<String>,
    /// How far it has come.
    pub stage: Stage,
    /// Whether the installation was changed.
    pub installation: Installation,
    /// The files that were switched, in order.
    #[serde(default)]
    pub switched: Vec<String>,
    /// The first complete observation of readiness.
    pub ready_observed_at: Option<Timestamp>,
    /// How it ended, if it has.
    pub outcome: Option<Outcome>,
    /// What is worth knowing and no failure.
    #[serde(default)]
    pub warnings: Vec<String>,
    /// The unit that did it, if one did.
    pub unit: Option<String>,
    /// systemd's id of that unit's run.
    pub invocation_id: Option<String>,
    /// The boot in which it was accepted.
    pub boot_id: String,
    /// When it was accepted.
    pub accepted_at: Timestamp,
    /// When this record was last written.
    pub updated_at: Timestamp,
    /// When the outcome was written.
    pub ended_at: Option<Timestamp>,
    /// The command that shows its whole story.
    pub diagnostics: String,
}

/// The state of an attempt, as a reader derives it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum State {
    /// It has an outcome.
    Ended,
    /// It holds admission.
    Running,
    /// It has no outcome and runs no more.
    Interrupted {
        /// How that is known.
        evidence: String,
    },
    /// This reader can't see.
    Unknown {
        /// Why.
        why: String,
    },
}

/// Whether a text is an attempt's id: 32 lower-case hex digits.
pub fn is_id(text: &str) -> bool {
    text.len() == 32 && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
}

impl Record {
    /// The record of an attempt that is accepted now.
    pub(crate) fn new(
        host: &Host,
        id: &str,
        kind: &str,
        requested: Requested,
        target: Option<Version>,
    ) -> Self {
        let now = Timestamp::now();
        Self {
            schema: SCHEMA,
            id: id.to_owned(),
            sequence: records::newest_sequence(host).saturating_add(1),
            kind: kind.to_owned(),
            requested,
            target,
            target_digest: None,
            from: None,
            from_digest: None,
            stage: Stage::Accepted,
            installation: Installation::Unchanged,
            switched: Vec::new(),
            ready_observed_at: None,
            outcome: None,
            warnings: Vec::new(),
            unit: own_unit(),
            invocation_id: std::env::var("INVOCATION_ID").ok().filter(|id| is_id(id)),
            boot_id: host.boot_id(),
            accepted_at: now,
            updated_at: now,
            ended_at: None,
            diagnostics: format!("journalctl _UID=0 PLOYZ_ATTEMPT={id}"),
        }
    }

    /// What an attempt without an outcome did to the installation, from the digest of what is in place now: it may have
    /// been cut off after a rename and before it wrote so.
    pub fn installation_now(&self, in_place: Option<&str>) -> Installation {
        let target = self.target_digest.as_deref();
        let switched = target.is_some() && target == in_place && self.from_digest.as_deref() != target;
        if self.outcome.is_none() && switched { Installation::Replaced } else { self.installation }
    }

    /// The state, from the record, this boot's id and what is seen of admission.
    pub fn state(&self, boot_id: &str, admission: &Observed, exit: Option<&str>) -> State {
        if self.outcome.is_some() {
            return State::Ended;
        }
        if self.boot_id != boot_id {
            let evidence =
                format!("the Machine was restarted (boot {} → {})", short(&self.boot_id), short(boot_id));
            return State::Interrupted { evidence };
        }
        let evidence = || exit.map_or_else(|| "none: it ended without a word".to_owned(), str::to_owned);
        match admission {
            Observed::Installing { holder: Some(holder) } if holder.attempt == self.id => State::Running,
            Observed::Unknown { why } => State::Unknown { why: why.clone() },
            // The lock is held, and by whom is not readable for a moment or for us: it may well be this one.
            Observed::Installing { holder: None } => {
                State::Unknown { why: "who installs can't be read".into() }
            }
            _ => State::Interrupted { evidence: evidence() },
        }
    }
}

/// Which executable is in place, by its digest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum InPlace {
    /// The attempt's target.
    Target,
    /// What was there before the attempt.
    Before,
    /// Another one.
    Other,
    /// None can be read.
    Unknown,
}

impl Record {
    /// Which executable is in place now, seen from this attempt.
    pub fn in_place(&self, digest: Option<&str>) -> InPlace {
        match digest {
            None => InPlace::Unknown,
            Some(_) if digest == self.target_digest.as_deref() => InPlace::Target,
            Some(_) if digest == self.from_digest.as_deref() => InPlace::Before,
            Some(_) => InPlace::Other,
        }
    }
}

fn short(id: &str) -> &str {
    id.get(..4).unwrap_or(id)
}

/// The unit of ours whose cgroup this process is in: the scope of an installer, the service of a worker.
pub(crate) fn own_unit() -> Option<String> {
    let text = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    let path = text.lines().find_map(|line| line.strip_prefix("0::"))?;
    let ours = |part: &&str| {
        let scope = part.strip_prefix(SCOPE_PREFIX).and_then(|rest| rest.strip_suffix(".scope"));
        scope.is_some_and(|id| id.len() == 8 && id.bytes().all(|b| b.is_ascii_hexdigit()))
            || part.starts_with("ployz-upgrade@")
    };
    path.rsplit('/').find(ours).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::admission::Holder;
    use super::*;

    fn record() -> Record {
        let host = Host::under(Path::new("/nonexistent"), Path::new("/nonexistent"));
        Record::new(&host, &"0a".repeat(16), "install", Requested::Itself, None)
    }

    fn holder(attempt: &str) -> Observed {
        let holder =
            Holder { attempt: attempt.into(), kind: "install".into(), pid: 1, since: Timestamp::UNIX_EPOCH };
        Observed::Installing { holder: Some(holder) }
    }

    #[test]
    fn the_state_is_derived_in_order() {
        let open = record();
        let mut ended = record();
        ended.outcome = Some(Outcome::Interrupted { stage: Stage::Acquiring, evidence: "x".into() });
        let own = open.boot_id.as_str();
        let interrupted = |evidence: &str| State::Interrupted { evidence: evidence.into() };
        let restarted = format!("the Machine was restarted (boot {} → beef)", short(own));
        let unknown = Observed::Unknown { why: "permission denied".into() };
        let table = [
            ("an outcome decides", &ended, "beef", holder(&ended.id), None, State::Ended),
            ("another boot", &open, "beef", holder(&open.id), None, interrupted(&restarted)),
            ("it holds the lock", &open, own, holder(&open.id), None, State::Running),
            (
                "another holds it",
                &open,
                own,
                holder("ff"),
                None,
                interrupted("none: it ended without a word"),
            ),
            ("nobody holds it", &open, own, Observed::Free, Some("killed"), interrupted("killed")),
            (
                "a mutation",
                &open,
                own,
                Observed::Mutating { doing: None },
                None,
                interrupted("none: it ended without a word"),
            ),
            (
                "not allowed to look",
                &open,
                own,
                unknown,
                None,
                State::Unknown { why: "permission denied".into() },
            ),
        ];
        for (name, record, boot, admission, exit, expected) in table {
            assert_eq!(record.state(boot, &admission, exit), expected, "{name}");
        }
    }
}
