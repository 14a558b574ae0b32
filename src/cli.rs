//! The command lines: verbs, flags, screens, exit codes. The only place that prints and decides how a process ends.

pub(crate) mod attempt;
pub(crate) mod doctor;
pub(crate) mod install;
pub(crate) mod machine;
pub(crate) mod operator;
pub(crate) mod output;
pub(crate) mod ployzd;
pub(crate) mod recover;
pub(crate) mod service;
pub(crate) mod status;
pub(crate) mod uninstall;
pub(crate) mod upgrade;
pub(crate) mod worker;

use std::process::ExitCode;

/// How a command ended, as every verb says it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Exit {
    /// Done.
    Done,
    /// The command line is not understood.
    Usage,
    /// Another has admission.
    Busy,
    /// Refused or failed; the installation is unchanged.
    Unchanged,
    /// Failed; the installation was replaced and needs repair.
    Replaced,
    /// Interrupted, or not known.
    Unknown,
    /// This user may not do it.
    NotPermitted,
    /// The daemon's configuration is wrong: starting it again changes nothing.
    Configuration,
    /// This number, for hidden verbs.
    Raw(u8),
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(match exit {
            Exit::Done => 0,
            Exit::Usage => 2,
            Exit::Busy => 3,
            Exit::Unchanged => 4,
            Exit::Replaced => 5,
            Exit::Unknown => 6,
            Exit::NotPermitted => 77,
            Exit::Configuration => 78,
            Exit::Raw(status) => status,
        })
    }
}

/// Prints what clap has to say: help that was asked for, or what is wrong with the command line.
fn not_a_command(error: &clap::Error) -> Exit {
    match (error.print(), error.use_stderr()) {
        (_, true) => Exit::Usage,
        (Ok(()), false) => Exit::Done,
        // Output that nobody takes is not output.
        (Err(_), false) => Exit::Unknown,
    }
}
