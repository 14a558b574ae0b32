//! Releases that are broken, each in one way: the real program for every verb but the one that it spoils.

use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};
use std::time::Duration;

use ployz::install::units::{Unit, shipped};

/// What is spoiled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Spoiled {
    /// The daemon exits with 42 at once.
    Exits42,
    /// The daemon serves and never says READY.
    NeverReady,
    /// The daemon says READY, serves, and aborts five seconds later.
    CrashesLater,
    /// The Machine API answers with another version.
    WrongVersion,
    /// The daemon says READY and never answers.
    NeverAnswers,
    /// One of its units is not understood by systemd.
    BadUnit,
    /// One of its units names a group that does not exist.
    NeedsGroup,
    /// It never says which version it is.
    PreflightHangs,
    /// It says more than anyone wants to hear.
    PreflightFloods,
    /// It says which version it is, and leaves processes behind.
    PreflightForks,
    /// Its volume plugin does not come back.
    LostPlugin,
}

/// Is a release that is spoiled so.
pub fn run(spoiled: Spoiled, version: &'static str) -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match (spoiled, words.as_slice()) {
        (Spoiled::Exits42, ["daemon"]) => return ExitCode::from(42),
        (Spoiled::NeverReady, ["daemon"]) if std::env::var_os("NOTIFY_SOCKET").is_some() => {
            let e = Command::new("/proc/self/exe").arg("daemon").env_remove("NOTIFY_SOCKET").exec();
            return said(&format!("becoming itself: {e}"));
        }
        (Spoiled::CrashesLater, ["daemon"]) => {
            std::thread::spawn(|| {
                std::thread::sleep(Duration::from_secs(5));
                std::process::abort()
            });
        }
        (Spoiled::WrongVersion, ["daemon"]) => return ployz::ployzd("9.9.9"),
        (Spoiled::NeverAnswers, ["daemon"]) => {
            let _ = sd_notify::notify(&[sd_notify::NotifyState::Ready]);
            sleep();
        }
        (Spoiled::LostPlugin, ["volume-plugin"]) => return said("the plugin of this release does not start"),
        (Spoiled::PreflightHangs, ["version", ..]) => sleep(),
        (Spoiled::PreflightFloods, ["version", ..]) => loop {
            said(&"flood ".repeat(10_000));
            print(&"flood ".repeat(10_000));
        },
        (Spoiled::PreflightForks, ["version", ..]) => {
            for _ in 0..3 {
                let _ = Command::new("/proc/self/exe").arg("linger").process_group(0).spawn();
            }
        }
        (Spoiled::PreflightForks, ["linger"]) => sleep(),
        (Spoiled::BadUnit | Spoiled::NeedsGroup, ["units", "--json"]) => {
            print(&serde_json::to_string(&units(spoiled)).unwrap_or_default());
            return ExitCode::SUCCESS;
        }
        _ => {}
    }
    ployz::ployzd(version)
}

fn sleep() -> ! {
    loop {
        std::thread::sleep(Duration::from_secs(3600));
    }
}

#[allow(clippy::print_stderr, reason = "its last words")]
fn said(words: &str) -> ExitCode {
    eprintln!("{words}");
    ExitCode::from(3)
}

#[allow(clippy::print_stdout, reason = "it is asked by whoever runs it")]
fn print(text: &str) {
    println!("{text}");
}

fn units(spoiled: Spoiled) -> Vec<Unit> {
    let mut units = shipped();
    let daemon = units.iter_mut().find(|unit| unit.name == "ployz.service");
    if let Some(daemon) = daemon {
        match spoiled {
            Spoiled::BadUnit => daemon.content = daemon.content.replace("Type=notify", "Type=hopeful"),
            Spoiled::NeedsGroup => {
                daemon.content = daemon.content.replace("Group=ployz\n", "Group=ployz-elsewhere\n");
            }
            _ => {}
        }
    }
    units
}
