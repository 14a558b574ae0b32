//! Rung 2: `bootstrap/machine.sh` under every shell and with every downloader that people pipe it into.
//!
//! It is run as root of a user namespace (`world`), against a real release source over real TLS; what stands in
//! for something else is the `ployzd` that it fetches, which is a shell script here.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

#[path = "bootstrap/refusals.rs"]
mod refusals;
#[path = "bootstrap/signals.rs"]
mod signals;
#[path = "bootstrap/source.rs"]
mod source;
#[path = "bootstrap/truncation.rs"]
mod truncation;
#[path = "bootstrap/world.rs"]
mod world;

use std::fs;
use std::process::Command;

use kit::release::Archive;
use world::{SHELLS, World, enter, real, script};

/// What must reach ployzd as it was typed.
const AWKWARD: &[&str] =
    &["--group-user", "a  b", "", "*", "$HOME", "'\"`\\", "--x=\t\n", "-n", "--", "--version"];

#[test]
fn every_shell_with_every_client_from_pipe_and_file() {
    let Some(world) = enter!() else { return };
    fs::write(world.home("exit"), "5").unwrap();
    let awkward = &AWKWARD[..AWKWARD.len() - 1];
    for client in ["curl", "wget"] {
        world.take_away("curl");
        world.grant(client, client);
        for shell in SHELLS {
            for file in [false, true] {
                let run = world.run(awkward).shell(shell);
                let ended = if file { run.file(script()) } else { run }.end();
                let what = format!("{client}, {}, file: {file}: {ended:?}", shell.name);
                assert_eq!(ended.code, 5, "{what}");
                assert_eq!(ended.out, "ployzd was here\n", "{what}");
                let screen = [
                    format!("ployz: PLOYZ_RELEASES={}/releases/download\n", world.server.url()),
                    format!("ployz: PLOYZ_CHANNELS={}\n", world.server.url()),
                    "ployz: stable is 1.4.0\n".to_owned(),
                    format!("ployz: {}  0.0 MB  sha256 ok\n", kit::release::archive_name()),
                ];
                assert_eq!(ended.err, screen.concat(), "{what}");
                assert_was_installed(&world, "1.4.0", &[&["--channel", "stable"], awkward].concat(), &what);
            }
        }
    }
}

/// Checks what ployzd was called with and what was around it, and that nothing is left.
fn assert_was_installed(world: &World, version: &str, rest: &[&str], what: &str) {
    let called = world.called().unwrap_or_else(|| panic!("ployzd did not run: {what}"));
    let staging = called[0].strip_suffix("/ployzd").unwrap();
    assert!(staging.starts_with(world::BASE), "{what}");
    let (archive, checksums) =
        (format!("{staging}/{}", kit::release::archive_name()), format!("{staging}/checksums.txt"));
    let ours = ["install", "--version", version, "--archive", &archive, "--checksums", &checksums];
    assert_eq!(called[1..], [&ours, rest].concat(), "{what}");
    let noted = |name| fs::read_to_string(world.home(name)).unwrap();
    assert_eq!((noted("stdin").as_str(), noted("mode").trim()), ("", "700"), "{what}");
    assert_eq!(noted("umask").trim().trim_start_matches('0'), "22", "{what}");
    for staged in ["ployzd", "checksums.txt", &kit::release::archive_name()] {
        assert!(noted("listing").lines().any(|line| line.ends_with(&format!(" {staged}"))), "{what}");
    }
    assert_eq!(world.staged(), Vec::<std::path::PathBuf>::new(), "{what}");
}

#[test]
fn the_size_is_said() {
    let Some(world) = enter!() else { return };
    let noise: Vec<u8> = (0_u32..2_200_000)
        .map(|number| number.wrapping_mul(2_654_435_761).rotate_left(number % 31).to_le_bytes()[1])
        .collect();
    let archive = Archive::new().file("noise", noise).file("ployzd", "#!/bin/sh\n");
    let length = world.publish_archive("1.4.0", archive).length;
    assert!(length > 1_000_000, "{length}");
    let ended = world.run(&[]).end();
    let size = format!("  {}.{} MB  sha256 ok\n", length / 1_000_000, length / 100_000 % 10);
    assert!(ended.code == 0 && ended.err.ends_with(&size), "{size}: {ended:?}");
}

#[test]
fn options() {
    let Some(world) = enter!() else { return };
    for shell in SHELLS {
        // What is typed; the version and the rest that ployzd gets.
        for (typed, version, rest) in [
            (&[][..], "1.4.0", &["--channel", "stable"][..]),
            (&["--channel", "stable"], "1.4.0", &["--channel", "stable"]),
            (&["--json", "--channel=beta", "--x"], "1.5.0-beta.2", &["--channel", "beta", "--json", "--x"]),
            (&["--version", "1.4.0", "--json"], "1.4.0", &["--json"]),
            (&["--json", "--version=1.5.0-beta.2"], "1.5.0-beta.2", &["--json"]),
        ] {
            let ended = world.run(typed).shell(shell).end();
            let what = format!("{} {typed:?}: {ended:?}", shell.name);
            assert_eq!(ended.code, 0, "{what}");
            assert_was_installed(&world, version, rest, &what);
        }
        for (typed, words) in [
            (&["--version"][..], "no value: --version="),
            (&["--json", "--channel"], "no value: --channel="),
            (&["--version="], "not a version: \n"),
            (&["--version", ""], "not a version: \n"),
            (&["--version", "v1.4.0"], "not a version: v1.4.0\n"),
            (&["--version", "1.4.0\n"], "not a version: 1.4.0?\n"),
            (&["--version", "1.4.0\n1.4.0"], "not a version: 1.4.0?1.4.0\n"),
            (&["--version", "1.4.0/../../x"], "not a version: 1.4.0/../../x\n"),
            (&["--version", "--json"], "not a version: --json\n"),
            (&["--version", "1.4.0", "--channel", "stable"], "both --version and --channel"),
            (&["--channel", "nightly"], "no channel nightly: stable or beta"),
            (&["--channel", "../x\u{1b}[2J"], "no channel ../x?[2J: stable or beta"),
            (&["--channel="], "no channel : stable or beta"),
        ] {
            world.run(typed).shell(shell).refused(2, words);
        }
        let help = world.run(&["--json", "--help"]).shell(shell).ordinary_user().end();
        assert_eq!((help.code, help.err.contains("not root")), (0, false), "{help:?}");
        assert!(help.out.starts_with("usage: sh machine.sh [--version"), "{help:?}");
    }
}

#[test]
fn every_exit_code_of_ployzd_is_passed_on() {
    let Some(world) = enter!() else { return };
    for shell in SHELLS {
        for code in [0, 2, 3, 4, 5, 6, 77] {
            fs::write(world.home("exit"), code.to_string()).unwrap();
            let ended = world.run(&["--version", "1.4.0"]).shell(shell).end();
            assert_eq!(ended.code, code, "{}: {ended:?}", shell.name);
        }
        fs::write(world.home("script"), "kill -KILL $$").unwrap();
        let ended = world.run(&["--version", "1.4.0"]).shell(shell).end();
        assert_eq!(ended.code, 128 + 9, "{}: {ended:?}", shell.name);
        fs::remove_file(world.home("script")).unwrap();
    }
}

#[test]
fn the_script_is_small_clean_and_one_call() {
    let text = fs::read_to_string(script()).unwrap();
    assert!(text.len() <= 6144, "{} bytes", text.len());
    assert_eq!(text.lines().last(), Some(r#"{ main "$@"; }"#));
    assert!(!text.contains("eval"));
    let output = Command::new(real("shellcheck")).args(["-s", "sh"]).arg(script()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    for shell in SHELLS {
        let output = shell.command().arg("-n").arg(script()).output().unwrap();
        assert!(output.status.success() && output.stderr.is_empty(), "{}: {output:?}", shell.name);
    }
}
