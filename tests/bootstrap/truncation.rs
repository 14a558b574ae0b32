//! The script cut off after any byte, as a broken connection cuts it: nothing happens.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Stdio;

use crate::world::{DASH, SHELLS, Shell, World, enter, script};

/// So few bytes before the end, every shell reads every cut.
const END: usize = 200;

/// A directory in which every word of the script, and every beginning of a word, is a program that notes its call.
struct Sentinels {
    path: PathBuf,
    called: PathBuf,
}

impl Sentinels {
    fn new(world: &World, text: &str) -> Self {
        let (path, called) = (world.directory.join("sentinels"), world.directory.join("called"));
        fs::create_dir(&path).unwrap();
        let sentinel = world.directory.join("sentinel");
        fs::write(&sentinel, format!("#!/bin/sh\necho \"$0 $*\" >>{}\n", called.display())).unwrap();
        fs::set_permissions(&sentinel, PermissionsExt::from_mode(0o755)).unwrap();
        let words = text.split(|byte: char| !(byte.is_ascii_alphanumeric() || "_-.+[".contains(byte)));
        let names: BTreeSet<_> = words.flat_map(|word| (1..=word.len()).map(|end| &word[..end])).collect();
        for name in names.into_iter().filter(|name| !matches!(*name, "." | "..")) {
            symlink(&sentinel, path.join(name)).unwrap();
        }
        Self { path, called }
    }
}

/// Runs the first `cut` bytes and checks that nothing came of it but, perhaps, a shell's complaint.
fn check(world: &World, sentinels: &Sentinels, shell: Shell, text: &[u8], cut: usize) {
    let (input, cwd) = (world.directory.join("cut"), world.directory.join("cwd"));
    fs::write(&input, &text[..cut]).unwrap();
    let output = shell
        .command()
        .env_clear()
        .envs([("PATH", &sentinels.path), ("HOME", &cwd)])
        .current_dir(&cwd)
        .stdin(Stdio::from(File::open(&input).unwrap()))
        .output()
        .unwrap();
    let what = format!("{} at byte {cut}: {output:?}", shell.name);
    assert!(output.stdout.is_empty(), "{what}");
    let complaint = String::from_utf8_lossy(&output.stderr).to_lowercase();
    let syntax = ["syntax error", "parse error", "expected", "unterminated", "unmatched"];
    assert!(complaint.is_empty() || syntax.iter().any(|words| complaint.contains(words)), "{what}");
    assert!(!complaint.contains("ployz:"), "{what}");
    assert!(!sentinels.called.exists(), "{what}: {}", fs::read_to_string(&sentinels.called).unwrap());
    assert_eq!(fs::read_dir(&cwd).unwrap().count(), 0, "{what}");
    assert!(!Path::new("/usr/local/lib").exists(), "{what}");
}

#[test]
fn cut_off_after_any_byte_nothing_happens() {
    let Some(world) = enter!() else { return };
    let text = fs::read(script()).unwrap();
    let sentinels = Sentinels::new(&world, std::str::from_utf8(&text).unwrap());
    // The last byte is the end of the line: without it the script is whole.
    let whole = text.len() - 1;
    for cut in 0..whole {
        check(&world, &sentinels, DASH, &text, cut);
    }
    for (number, shell) in SHELLS.into_iter().enumerate().skip(1) {
        for cut in (number..whole - END).step_by(17).chain(whole - END..whole) {
            check(&world, &sentinels, shell, &text, cut);
        }
    }
    // The sentinels do note what the whole script calls.
    let status = DASH.command().arg(script()).env_clear().env("PATH", &sentinels.path).status().unwrap();
    assert!(!status.success() && sentinels.called.exists());
}
