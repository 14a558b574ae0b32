//! `ployzd`: its verbs and what each does.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand, ValueEnum};

use super::output::{self, error};
use super::{Exit, attempt, doctor, install, machine, recover, service, status, uninstall, upgrade, worker};
use crate::host::Host;
use crate::install::preflight::About;
use crate::install::release::{Channel, Version};
use crate::install::{confine, fetch, units};

/// The Ployz Machine daemon, and its installer.
#[derive(Debug, Parser)]
#[command(name = "ployzd", disable_help_subcommand = true, arg_required_else_help = true)]
#[command(
    after_help = "Exit status: 0 done, 2 usage, 3 busy, 4 refused or failed with the installation unchanged, \
    5 failed with the installation replaced, 6 interrupted or unknown, 77 not permitted."
)]
struct Command {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Install a release on this Machine and confirm that it runs (root)
    ///
    /// Without --version and --channel this executable installs itself; run from /usr/local/bin it repairs what is
    /// installed. Nothing is replaced or restarted that is in place and running already.
    Install(Install),
    /// Ask the daemon for an upgrade, and follow it (root or group ployz)
    ///
    /// The attempt is carried out by a worker of its own: it goes on whatever becomes of this command, of the session or
    /// of the daemon. Under the same --attempt it is never started twice.
    Upgrade(Upgrade),
    /// Put the retained release back, by hand (root)
    ///
    /// Run as /usr/local/bin/ployzd.previous it puts itself back, whatever is wrong with the release in place. The daemon
    /// and what it does are stopped first. Nothing ever does this by itself, and no data is rolled back.
    Recover(Recover),
    /// Remove Ployz from this Machine (root)
    ///
    /// Docker, images and named volumes stay; so do state, records, settings and accounts without --purge. What was cut
    /// off or failed is gone on with by the same command.
    Uninstall(Uninstall),
    /// Show an attempt to install or upgrade: by default the latest
    Attempt(Attempt),
    /// Show what runs, what is installed, and where they differ
    Status(Json),
    /// Check this Machine, and say what to type where something is wrong; changes nothing
    Doctor(Json),
    /// Initialize or reset this Machine
    #[command(subcommand)]
    Machine(MachineVerb),
    /// Deploy, list or remove services: containers of this Machine (root or group ployz)
    #[command(subcommand)]
    Service(ServiceVerb),
    /// Show this executable's version and what it requires of a host
    Version(Json),
    /// Show the unit files that this release brings
    Units(Json),
    /// Serve the Machine API on the socket that systemd passes
    Daemon,
    /// Serve Docker's volumes on the socket that systemd passes
    VolumePlugin,
    /// Fetch what an order on stdin names, confined
    #[command(hide = true)]
    Fetch,
    /// Serve the connection to the upgrade door that systemd passes
    #[command(hide = true)]
    UpgradeWorker,
    /// Leave how the unit of an upgrade ended beside its record
    #[command(hide = true)]
    UpgradeEnded,
    /// Serve the connection to the deploy door that systemd passes
    #[command(hide = true)]
    DeployWorker,
    /// End what the worker of a Deploy left in the middle
    #[command(hide = true)]
    DeployEnded,
    /// Confine this process and become another
    #[command(hide = true)]
    Confine {
        #[arg(last = true, required = true)]
        target: Vec<OsString>,
    },
}

#[derive(Debug, Args)]
struct Json {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Install {
    /// Install this exact release
    #[arg(long, value_name = "X.Y.Z")]
    pub(crate) version: Option<Version>,
    /// Install what this channel points to: stable or beta (with --archive: only recorded)
    #[arg(long, value_name = "CHANNEL")]
    pub(crate) channel: Option<Channel>,
    /// Take the archive from this file instead of the release source
    #[arg(long, value_name = "FILE", requires = "checksums", requires = "version")]
    pub(crate) archive: Option<PathBuf>,
    /// Take checksums.txt from this file
    #[arg(long, value_name = "FILE", requires = "archive")]
    pub(crate) checksums: Option<PathBuf>,
    /// Replace the software only: accounts, directories and Docker must be there
    #[arg(long, conflicts_with = "installation_only")]
    pub(crate) software_only: bool,
    /// Write files only and never contact systemd: for building images
    #[arg(long)]
    pub(crate) installation_only: bool,
    /// Whether this Machine uses Docker: auto installs it where there is none, and never changes one that is there
    /// (recorded; by default what was chosen before, or auto)
    #[arg(long, value_enum, value_name = "auto|none", conflicts_with = "installation_only")]
    pub(crate) docker: Option<DockerChoice>,
    /// Whether storage for volumes is prepared: zfs installs ZFS and makes a pool where there is none; none leaves volumes
    /// directories (the default). A pool that is there is never made anew
    #[arg(long, value_enum, value_name = "zfs|none", conflicts_with_all = ["software_only", "installation_only"])]
    pub(crate) storage: Option<StorageChoice>,
    /// Make the pool of this device, which must be blank
    #[arg(long, value_name = "DEVICE", requires = "storage", conflicts_with = "pool_file")]
    pub(crate) pool_device: Option<PathBuf>,
    /// Make the pool of a file of this size: 20g
    #[arg(long, value_name = "SIZE", requires = "storage", value_parser = pool_size)]
    pub(crate) pool_file: Option<u64>,
    /// Add this user to group ployz, whose members may use the Machine API (may be repeated)
    #[arg(long, value_name = "USER", conflicts_with_all = ["software_only", "installation_only"])]
    pub(crate) group_user: Vec<String>,
    /// Only say what would change: takes no lock, writes nothing
    #[arg(long)]
    pub(crate) dry_run: bool,
    /// Print one JSON object a line; the last is the outcome
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Recover {
    /// Do not ask
    #[arg(long)]
    pub(crate) yes: bool,
    /// Print one JSON object a line; the last is the outcome (does not ask: takes --yes)
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Uninstall {
    /// Remove state, records, settings and accounts, too
    #[arg(long)]
    pub(crate) purge: bool,
    /// Do not ask
    #[arg(long)]
    pub(crate) yes: bool,
    /// Print JSON (does not ask: takes --yes)
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Upgrade {
    /// This exact release
    #[arg(long, value_name = "X.Y.Z", required_unless_present = "channel")]
    pub(crate) version: Option<Version>,
    /// What this channel points to now: stable or beta
    #[arg(long, value_name = "CHANNEL", conflicts_with = "version")]
    pub(crate) channel: Option<Channel>,
    /// The id that the attempt shall have (32 lower-case hex digits; by default a random one)
    #[arg(long, value_name = "ID")]
    pub(crate) attempt: Option<String>,
    /// Return as soon as it is accepted
    #[arg(long)]
    pub(crate) no_follow: bool,
    /// Print one JSON object a line; the last is the outcome
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Attempt {
    /// Its id
    #[arg(value_name = "ID", conflicts_with_all = ["latest", "list"])]
    pub(crate) id: Option<String>,
    /// The latest one
    #[arg(long, conflicts_with = "list")]
    pub(crate) latest: bool,
    /// All that are recorded, newest first
    #[arg(long, conflicts_with = "follow")]
    pub(crate) list: bool,
    /// Follow it to its end
    #[arg(long)]
    pub(crate) follow: bool,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum DockerChoice {
    /// Use the Docker that is there, or install it
    Auto,
    /// Do without
    None,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum StorageChoice {
    /// Datasets of a ZFS pool
    Zfs,
    /// Directories
    None,
}

fn pool_size(text: &str) -> Result<u64, String> {
    crate::storage::size(text).ok_or_else(|| "a number with b, k, m, g or t, such as 20g".into())
}

#[derive(Debug, Subcommand)]
enum ServiceVerb {
    /// Deploy a service: one container, seen to work; another specification replaces it
    ///
    /// The image is there and the new container made before the old one stops, and the old one serves again when the new
    /// one does not. What was accepted goes on if this command is ended.
    Deploy(Box<Deploy>),
    /// Show what is deployed
    List(Json),
    /// Remove a service; its volumes and its image stay
    Remove {
        /// Its name
        #[arg(value_name = "NAME")]
        name: String,
        /// Print one JSON object a line; the last is the outcome
        #[arg(long)]
        json: bool,
    },
}

#[derive(Debug, Args)]
pub(crate) struct Deploy {
    /// Its name: lower-case letters, digits and dashes
    #[arg(value_name = "NAME")]
    pub(crate) name: String,
    /// The image, as Docker takes it
    #[arg(long, value_name = "IMAGE")]
    pub(crate) image: String,
    /// Publish a port of the container: 8080:80, 127.0.0.1:53:53/udp (may be repeated)
    #[arg(long, short, value_name = "[ADDRESS:]HOST:CONTAINER[/udp]")]
    pub(crate) publish: Vec<String>,
    /// Mount a named volume, which outlives the service: data:/data (may be repeated)
    #[arg(long, value_name = "NAME:/PATH[:ro]")]
    pub(crate) volume: Vec<String>,
    /// Set a variable (may be repeated)
    #[arg(long, short, value_name = "NAME=VALUE")]
    pub(crate) env: Vec<String>,
    /// When Docker starts it again
    #[arg(long, default_value = "unless-stopped", value_name = "no|always|on-failure|unless-stopped")]
    pub(crate) restart: String,
    /// A command in the container that ends with 0 while the service works
    #[arg(long, value_name = "COMMAND")]
    pub(crate) health_command: Option<String>,
    /// Seconds between two health checks
    #[arg(long, value_name = "SECONDS", requires = "health_command", default_value_t = 5)]
    pub(crate) health_interval: u16,
    /// Failed health checks in a row after which it is not healthy
    #[arg(long, value_name = "COUNT", requires = "health_command", default_value_t = 3)]
    pub(crate) health_retries: u16,
    /// Seconds after the start in which failed health checks do not count
    #[arg(long, value_name = "SECONDS", requires = "health_command", default_value_t = 0)]
    pub(crate) health_start: u16,
    /// When the image is pulled
    #[arg(long, default_value = "missing", value_name = "missing|always|never")]
    pub(crate) pull: String,
    /// Print one JSON object a line; the last is the outcome
    #[arg(long)]
    pub(crate) json: bool,
    /// Instead of the image's command
    #[arg(last = true, value_name = "COMMAND")]
    pub(crate) command: Vec<String>,
}

#[derive(Debug, Subcommand)]
enum MachineVerb {
    /// Give this Machine an identity
    Initialize {
        /// Its name; by default the host's
        #[arg(long)]
        name: Option<String>,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Remove this Machine's identity and its services; volumes stay (root)
    Reset {
        /// Do not ask
        #[arg(long)]
        yes: bool,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
}

/// Parses the command line and does what it says.
pub(crate) fn run(version: &'static str) -> ExitCode {
    let command = match Command::try_parse() {
        Ok(command) => command,
        Err(e) => {
            let exit = super::not_a_command(&e);
            // Whoever reads JSON reads an outcome, whatever it is.
            let mut arguments = std::env::args_os().skip(1);
            if exit == Exit::Usage
                && arguments
                    .next()
                    .is_some_and(|verb| verb == "install" || verb == "upgrade" || verb == "recover")
                && arguments.any(|a| a == "--json")
            {
                install::print_refused(
                    "usage",
                    &[(e.kind().to_string(), "look at: ployzd install --help".into())],
                );
            }
            return exit.into();
        }
    };
    let host = Host::system();
    match command.verb {
        Verb::Install(arguments) => install::run(&host, version, &arguments),
        Verb::Upgrade(arguments) => upgrade::run(&host, &arguments),
        Verb::Recover(arguments) => recover::run(&host, version, &arguments),
        Verb::Uninstall(arguments) => uninstall::run(&host, &arguments),
        Verb::Attempt(arguments) => attempt::run(&host, &arguments),
        Verb::Status(Json { json }) => status::run(&host, json),
        Verb::Doctor(Json { json }) => doctor::run(&host, json),
        Verb::Machine(MachineVerb::Initialize { name, json }) => machine::initialize(&host, name, json),
        Verb::Machine(MachineVerb::Reset { yes, json }) => machine::reset(&host, yes, json),
        Verb::Service(ServiceVerb::Deploy(arguments)) => service::deploy(&host, &arguments),
        Verb::Service(ServiceVerb::List(Json { json })) => service::list(&host, json),
        Verb::Service(ServiceVerb::Remove { name, json }) => service::remove(&host, &name, json),
        Verb::Version(Json { json }) => show_version(version, json),
        Verb::Units(Json { json }) => show_units(json),
        Verb::Daemon => daemon(&host, version),
        Verb::VolumePlugin => volume_plugin(&host, version),
        Verb::Fetch => Exit::Raw(fetch::child()),
        Verb::UpgradeWorker => worker::run(&host, version),
        Verb::UpgradeEnded => worker::ended(&host),
        Verb::DeployWorker => worker::deploy(&host),
        Verb::DeployEnded => worker::deploy_ended(&host),
        Verb::Confine { target } => {
            let e = confine::become_confined(&target);
            let program = target.first().cloned().unwrap_or_default();
            error(format!("running {program:?}: {e}"), None);
            Exit::Raw(126)
        }
    }
    .into()
}

fn show_version(version: &str, json: bool) -> Exit {
    let text = if json {
        serde_json::to_string(&About::this(version)).unwrap_or_default()
    } else {
        format!("ployzd {version}")
    };
    printed(output::stdout().line(text).is_ok())
}

fn show_units(json: bool) -> Exit {
    let units = units::shipped();
    if json {
        return printed(output::stdout().line(serde_json::to_string(&units).unwrap_or_default()).is_ok());
    }
    let mut out = output::stdout();
    let texts = units.iter().map(|unit| format!("# {}\n{}", unit.name, unit.content));
    printed({ texts }.try_for_each(|text| out.line(text)).is_ok())
}

/// Output that nobody takes is not output.
fn printed(taken: bool) -> Exit {
    if taken { Exit::Done } else { Exit::Unknown }
}

fn daemon(host: &Host, version: &'static str) -> Exit {
    super::install::log();
    match crate::daemon::run(host.clone(), version) {
        Ok(()) => Exit::Done,
        Err(e @ crate::daemon::DaemonError::NoSocket(_)) => {
            error(e.to_string(), Some("start it by its socket: systemctl start ployz.socket"));
            Exit::Configuration
        }
        Err(e) => {
            error(e.to_string(), None);
            Exit::Raw(1)
        }
    }
}

fn volume_plugin(host: &Host, version: &'static str) -> Exit {
    super::install::log();
    match crate::volume_plugin::run(host.clone(), version) {
        Ok(()) => Exit::Done,
        Err(e) => {
            let help = "start it by its socket: systemctl start ployz-volume-plugin.socket";
            error(format!("serving volumes: {e}"), Some(help));
            Exit::Configuration
        }
    }
}
