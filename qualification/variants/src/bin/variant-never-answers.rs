//! A release that is ready, and never answers.

use std::process::ExitCode;

use ployz_qualification_variants::{Spoiled, run};

fn main() -> ExitCode {
    run(Spoiled::NeverAnswers, option_env!("PLOYZ_VERSION").unwrap_or("0.0.0"))
}
