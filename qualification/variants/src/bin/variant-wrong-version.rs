//! A release that answers with another version.

use std::process::ExitCode;

use ployz_qualification_variants::{Spoiled, run};

fn main() -> ExitCode {
    run(Spoiled::WrongVersion, option_env!("PLOYZ_VERSION").unwrap_or("0.0.0"))
}
