//! `ployz`, the operator's command line: in this release it only says what it will do.

use std::process::ExitCode;

use clap::Parser;

use super::{Exit, output};

/// The operator's command line for Ployz Machines.
///
/// This release only says what it will do: add and upgrade Machines over SSH, enrol them in Cloud, deploy services.
/// On a Machine itself, use ployzd.
#[derive(Debug, Parser)]
#[command(name = "ployz", disable_help_subcommand = true)]
struct Command {
    /// Print the version
    #[arg(long, short = 'V')]
    version: bool,
}

/// Parses the command line and does what it says.
pub(crate) fn run(version: &'static str) -> ExitCode {
    let exit = match Command::try_parse() {
        Ok(Command { version: true }) => {
            let _ = output::stdout().line(format!("ployz {version}"));
            Exit::Done
        }
        Ok(_) => {
            output::error(
                "this release of ployz has no verbs yet",
                Some("on the Machine itself, look at: ployzd --help"),
            );
            Exit::Usage
        }
        Err(e) => super::not_a_command(&e),
    };
    exit.into()
}
