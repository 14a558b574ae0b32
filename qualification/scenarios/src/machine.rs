//! A test machine: declared, booted, asked, restarted, and gone when its value is dropped.

use std::fmt;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::client::Client;
use crate::lab::{lab, scratch};
use crate::look;
use crate::releases::{Release, release};
use crate::run::{Run, USUAL};
use crate::server::Server;

/// What a machine is made from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Image {
    /// Debian 13, systemd 257, no Docker.
    Trixie,
    /// Debian 13, systemd 257, Docker.
    TrixieDocker,
    /// Debian 12, systemd 252, Docker.
    Bookworm,
}

impl fmt::Display for Image {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Trixie => "trixie",
            Self::TrixieDocker => "trixie-docker",
            Self::Bookworm => "bookworm",
        })
    }
}

/// A machine that is not made yet.
#[derive(Debug)]
pub struct Plan {
    name: String,
    image: Image,
    settings: Value,
    installed: Option<String>,
}

/// A machine that runs. Dropping it destroys it, and shows what it went through when the test has failed.
#[derive(Debug)]
pub struct Machine {
    name: String,
    /// Shown by [`Machine::console`] and when the test fails.
    image: Image,
}

/// A command that still runs in a machine.
#[derive(Debug)]
pub struct Background {
    command: String,
    child: Child,
    output: PathBuf,
    started: Instant,
}

impl Machine {
    /// A machine of this name: letters, digits and dashes, its own in this process.
    pub fn named(name: &str) -> Plan {
        // Confirmation is watched for one second: scenarios that are about the window say another.
        let settings = json!({"schema": 1, "confirm_window": 1});
        Plan { name: name.to_owned(), image: Image::Trixie, settings, installed: None }
    }
}

impl Plan {
    /// Another image than trixie.
    #[must_use]
    pub fn image(mut self, image: Image) -> Self {
        self.image = image;
        self
    }

    /// Lets the machine take releases and channels from this server.
    #[must_use]
    pub fn served_by(self, server: &Server) -> Self {
        let url = server.url();
        self.setting("releases", json!(format!("{url}/releases/download"))).setting("channels", json!(url))
    }

    /// A field of `/etc/ployz/install.json`.
    #[must_use]
    pub fn setting(mut self, field: &str, value: Value) -> Self {
        self.settings[field] = value;
        self
    }

    /// Installs a release, without Docker, before the scenario begins.
    #[must_use]
    pub fn installed(mut self, version: &str) -> Self {
        self.installed = Some(version.to_owned());
        self
    }

    /// Makes the state of the machine and starts nothing; returns the directory that holds what the machine changes
    /// in its image (`upper`) and, in `tree`, the path of the image.
    pub fn create(&self) -> PathBuf {
        lab().machine(USUAL, &["create", &self.name, "--image", &self.image.to_string()]).ok();
        lab().state_of(&self.name)
    }

    /// Makes and boots it.
    #[track_caller]
    pub fn boot(self) -> Machine {
        let _ = self.create();
        self.start()
    }

    /// Boots what was made by [`Plan::create`].
    #[track_caller]
    pub fn start(self) -> Machine {
        let machine = Machine { name: self.name, image: self.image };
        machine.start();
        machine.write("/etc/ployz/install.json", &self.settings.to_string());
        if let Some(version) = self.installed {
            machine.install(&release(&version)).ok();
        }
        machine
    }
}

impl Machine {
    /// Its name, which is its host name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its image.
    pub fn image(&self) -> Image {
        self.image
    }

    /// Runs a command line inside, by `sh -c` as root.
    #[track_caller]
    pub fn run(&self, command: &str) -> Run {
        self.run_within(60, command)
    }

    /// The same with another bound, in seconds.
    #[track_caller]
    pub fn run_within(&self, seconds: u64, command: &str) -> Run {
        let bound = Duration::from_secs(seconds + 15);
        let words = ["sh", "--timeout", &seconds.to_string(), &self.name, "sh", "-c", command];
        Run { command: command.to_owned(), ..lab().machine(bound, &words) }
    }

    /// Runs a command line inside as another user, with that user's groups as a new login has them.
    #[track_caller]
    pub fn run_as(&self, user: &str, command: &str) -> Run {
        let run = self.run(&format!("exec runuser -u {user} -- sh -c {}", quoted(command)));
        Run { command: format!("{command}  (as {user})"), ..run }
    }

    /// Starts a command line inside and goes on.
    #[track_caller]
    pub fn start_run(&self, command: &str) -> Background {
        use std::sync::atomic::{AtomicUsize, Ordering};
        static NUMBER: AtomicUsize = AtomicUsize::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let output = scratch().join(format!("output-{}-{number}", self.name));
        let file = |what: &str| File::create(output.with_extension(what)).expect("making an output file");
        let words = lab().words(&["sh", "--timeout", "120", &self.name, "sh", "-c", command]);
        let child = Command::new(&words[0])
            .args(&words[1..])
            .stdin(Stdio::null())
            .stdout(file("out"))
            .stderr(file("err"))
            .spawn()
            .expect("starting a command");
        Background { command: command.to_owned(), child, output, started: Instant::now() }
    }

    /// Copies a file in, with its mode.
    #[track_caller]
    pub fn put(&self, file: &Path, path: &str) {
        self.run(&format!("mkdir -p {}", parent(path))).ok();
        lab().machine(USUAL, &["put", &self.name, &file.display().to_string(), path]).ok();
    }

    /// Writes a file inside, mode 0644.
    #[track_caller]
    pub fn write(&self, path: &str, text: &str) {
        let command = format!("umask 022; mkdir -p {}; printf %s {} >{path}", parent(path), quoted(text));
        self.run(&command).ok();
    }

    /// What a file inside holds.
    #[track_caller]
    pub fn read(&self, path: &str) -> String {
        self.run(&format!("cat {path}")).expect(0).stdout
    }

    /// Copies a release in; returns the arguments that install it from there.
    #[track_caller]
    pub fn deliver(&self, release: &Release) -> String {
        let dir = format!("/root/{}-{}", release.version, &release.sha256[..8]);
        let name = "ployzd_linux_amd64.tar.gz";
        self.put(&release.archive(), &format!("{dir}/{name}"));
        self.put(&release.checksums(), &format!("{dir}/checksums.txt"));
        self.put(&release.ployzd(), &format!("{dir}/ployzd"));
        format!("--version {} --archive {dir}/{name} --checksums {dir}/checksums.txt", release.version)
    }

    /// Installs a release as the bootstrap does it: by its own executable, from its archive, without Docker.
    #[track_caller]
    pub fn install(&self, release: &Release) -> Run {
        let from = self.deliver(release);
        let ployzd = format!("/root/{}-{}/ployzd", release.version, &release.sha256[..8]);
        self.run(&format!("{ployzd} install {from} --docker none --json"))
    }

    /// A client that asks for the Machine all the time.
    pub fn client(&self) -> Client {
        let leader = lab().machine(USUAL, &["leader", &self.name]).expect(0);
        // Through the root of its PID 1: reaches the same socket, and needs no process inside.
        Client::of(format!("/proc/{}/root/run/ployz/ployz.sock", leader.text()).into())
    }

    /// Waits until something is so; looks each 50 ms.
    #[track_caller]
    pub fn until(&self, what: &str, mut seen: impl FnMut(&Self) -> bool) {
        let started = Instant::now();
        while !seen(self) {
            assert!(started.elapsed() < Duration::from_secs(30), "it did not come to this in 30 s: {what}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Restarts it in an orderly way.
    #[track_caller]
    pub fn reboot(&self) {
        lab().machine(Duration::from_secs(150), &["reboot", &self.name]).ok();
        self.booted();
    }

    /// Takes its power away, and boots it again.
    #[track_caller]
    pub fn lose_power(&self) {
        lab().machine(USUAL, &["kill", &self.name]).ok();
        self.start();
    }

    /// What its console has shown.
    pub fn console(&self) -> String {
        lab().machine(USUAL, &["console", &self.name]).stdout
    }

    #[track_caller]
    fn start(&self) {
        lab().machine(Duration::from_secs(150), &["boot", &self.name]).ok();
        self.booted();
    }

    #[track_caller]
    fn booted(&self) {
        lab().machine(USUAL, &["ready", &self.name]).ok();
    }

    /// Everything that tells what happened here.
    fn show(&self) {
        let units = ("units", "systemctl status --no-pager -l -n 5 'ployz*'");
        for (title, command) in [units].into_iter().chain(look::SECTIONS) {
            eprintln!(
                "=== {} ({}): {title}\n{}",
                self.name,
                self.image,
                self.run_within(20, command).both().trim_end()
            );
        }
        let console = self.console();
        let lines: Vec<&str> = console.lines().collect();
        eprintln!("=== {}: console\n{}", self.name, lines[lines.len().saturating_sub(25)..].join("\n"));
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.show();
        }
        let run = lab().machine(USUAL, &["destroy", &self.name]);
        if run.code != 0 {
            eprintln!("{} is not destroyed:\n{}", self.name, run.shown());
        }
    }
}

impl Background {
    /// Whether it still runs.
    pub fn runs(&mut self) -> bool {
        self.child.try_wait().is_ok_and(|ended| ended.is_none())
    }

    /// Waits for its end, which its own bound of two minutes brings about if nothing else does.
    pub fn end(mut self) -> Run {
        let status = self.child.wait().expect("waiting for a command");
        let read = |what: &str| fs::read(self.output.with_extension(what)).unwrap_or_default();
        let output = Output { status, stdout: read("out"), stderr: read("err") };
        Run::new(self.command.clone(), &output, self.started.elapsed())
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        // The command inside dies with it.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn parent(path: &str) -> &str {
    path.rsplit_once('/').map_or("/", |(dir, _)| if dir.is_empty() { "/" } else { dir })
}

/// As one word of a shell.
pub(crate) fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}
