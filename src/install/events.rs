//! What an installation tells while it goes on, and what it refuses to begin.

use std::fmt;
use std::io;

use jiff::Timestamp;
use serde::Serialize;

use super::admission::Busy;
use super::attempt::{Record, Stage};
use super::preflight::Problem;

/// The schema of the events that `--json` prints.
pub const SCHEMA: u32 = 1;

/// One thing to tell. The last one of an accepted attempt is always its outcome.
#[derive(Debug, Serialize)]
pub struct Event<'a> {
    /// Of the format.
    pub schema: u32,
    /// What it is.
    #[serde(flatten)]
    pub what: What<'a>,
    /// When.
    pub at: Timestamp,
}

/// What there is to tell.
#[derive(Debug, Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum What<'a> {
    /// A stage began, or a fact about it was established.
    Stage {
        /// The attempt.
        attempt: &'a str,
        /// Its stage.
        stage: &'a Stage,
        /// The fact; none when the stage only began.
        fact: Option<&'a str>,
    },
    /// Bytes came.
    Progress {
        /// The attempt.
        attempt: &'a str,
        /// So many.
        bytes: u64,
        /// Of so many, if that is known.
        total: Option<u64>,
    },
    /// It ended.
    Outcome {
        /// The whole record.
        record: &'a Record,
    },
}

/// Tells of events. An error means that nobody listens any more.
pub type Tell<'a> = &'a mut dyn FnMut(&Event<'_>) -> io::Result<()>;

/// Why nothing was accepted: no record was made and nothing was changed.
#[derive(Debug)]
pub enum Refusal {
    /// Another has admission.
    Busy(Busy),
    /// This process may not do it.
    NotPermitted(Problem),
    /// Something is in the way.
    Refused(Vec<Problem>),
}

impl Refusal {
    pub(crate) fn one(what: impl Into<String>, help: impl Into<String>) -> Self {
        Self::Refused(vec![Problem::new(what, help)])
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Busy(busy) => write!(f, "busy: {}", busy.what()),
            Self::NotPermitted(problem) => f.write_str(&problem.what),
            Self::Refused(problems) => {
                let texts: Vec<&str> = problems.iter().map(|problem| problem.what.as_str()).collect();
                f.write_str(&texts.join("; "))
            }
        }
    }
}
