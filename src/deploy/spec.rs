//! What may be deployed: a specification that is bounded and checked before anything is done with it.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use serde::{Deserialize, Serialize};

const MOST_ITEMS: usize = 64;
const MOST_TEXT: usize = 4096;

/// One service: one container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Spec {
    /// Its name: 1 to 40 lower-case letters, digits and dashes.
    pub(crate) name: String,
    /// The image, as Docker takes it: `registry.example/web:1.2`, `web@sha256:…`.
    pub(crate) image: String,
    /// Instead of the image's command.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) command: Vec<String>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty", deserialize_with = "once_each")]
    pub(crate) environment: BTreeMap<String, String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) ports: Vec<Port>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) volumes: Vec<Volume>,
    #[serde(default)]
    pub(crate) restart: Restart,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) health: Option<Health>,
    #[serde(default)]
    pub(crate) pull: Pull,
}

/// A port of the container that the host publishes.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Port {
    pub(crate) host: u16,
    pub(crate) container: u16,
    #[serde(default)]
    pub(crate) protocol: Protocol,
    /// The address of the host; all of them by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) address: Option<IpAddr>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Protocol {
    #[default]
    Tcp,
    Udp,
}

impl Protocol {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
        }
    }
}

/// A named volume in the container. It outlives the service.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Volume {
    pub(crate) name: String,
    /// Where the container sees it.
    pub(crate) target: String,
    #[serde(default)]
    pub(crate) read_only: bool,
}

/// When Docker starts the container again.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Restart {
    No,
    Always,
    OnFailure,
    #[default]
    UnlessStopped,
}

impl Restart {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::No => "no",
            Self::Always => "always",
            Self::OnFailure => "on-failure",
            Self::UnlessStopped => "unless-stopped",
        }
    }
}

/// How it is known that the service works: a command in the container that ends with 0. Times in seconds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Health {
    /// The words of the command; one word is a line for the container's shell.
    pub(crate) command: Vec<String>,
    #[serde(default = "five")]
    pub(crate) interval: u16,
    #[serde(default = "five")]
    pub(crate) timeout: u16,
    #[serde(default = "three")]
    pub(crate) retries: u16,
    /// Failures before this are not counted.
    #[serde(default)]
    pub(crate) start: u16,
}

/// A map in which no key comes twice: which of the two counts would be anyone's guess.
fn once_each<'de, D: serde::Deserializer<'de>>(from: D) -> Result<BTreeMap<String, String>, D::Error> {
    struct OnceEach;
    impl<'de> serde::de::Visitor<'de> for OnceEach {
        type Value = BTreeMap<String, String>;
        fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("an object")
        }
        fn visit_map<A: serde::de::MapAccess<'de>>(self, mut entries: A) -> Result<Self::Value, A::Error> {
            let mut map = BTreeMap::new();
            while let Some((name, value)) = entries.next_entry::<String, String>()? {
                if map.len() >= 4 * MOST_ITEMS {
                    return Err(serde::de::Error::custom("too many variables"));
                }
                if map.insert(name, value).is_some() {
                    return Err(serde::de::Error::custom("a variable is named twice"));
                }
            }
            Ok(map)
        }
    }
    from.deserialize_map(OnceEach)
}

/// Whether everything that has names is an object: a list of the values would do for the reader of JSON as well.
pub(crate) fn has_names(spec: &serde_json::Value) -> bool {
    let objects = |field: &str| match spec.get(field) {
        Some(serde_json::Value::Array(items)) => items.iter().all(serde_json::Value::is_object),
        _ => true,
    };
    let health = spec.get("health").is_none_or(|health| health.is_object() || health.is_null());
    spec.is_object() && objects("ports") && objects("volumes") && health
}

/// Reads and checks a specification.
pub(crate) fn read(text: &[u8]) -> Result<Spec, String> {
    let spec: Spec = serde_json::from_slice(text).map_err(|e| e.to_string())?;
    let shape: serde_json::Value = serde_json::from_slice(text).map_err(|e| e.to_string())?;
    if !has_names(&shape) {
        return Err("a list stands in the place of an object".into());
    }
    let problems = spec.problems();
    if problems.is_empty() { Ok(spec) } else { Err(problems.join("; ")) }
}

fn five() -> u16 {
    5
}
fn three() -> u16 {
    3
}

/// When the image is pulled.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Pull {
    /// When it is not here.
    #[default]
    Missing,
    Always,
    Never,
}

/// Whether a text is a service's name. It becomes part of the container's.
pub(crate) fn is_name(name: &str) -> bool {
    let plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
    (1..=40).contains(&name.len())
        && name.bytes().all(plain)
        && !name.starts_with('-')
        && !name.ends_with('-')
}

impl Spec {
    /// What is wrong with it, all at once.
    pub(crate) fn problems(&self) -> Vec<String> {
        let mut problems = Vec::new();
        let mut unless = |good: bool, what: String| {
            if !good {
                problems.push(what);
            }
        };
        unless(
            is_name(&self.name),
            format!("{:?} is not a service's name: 1 to 40 lower-case letters, digits and dashes", self.name),
        );
        unless(is_image(&self.image), format!("{:?} is not an image's name", shown(&self.image)));
        let items = [self.command.len(), self.environment.len(), self.ports.len(), self.volumes.len()];
        unless(
            items.iter().all(|n| *n <= MOST_ITEMS),
            format!("there are more than {MOST_ITEMS} of one kind"),
        );
        unless(self.command.iter().all(|word| is_text(word)), "a word of the command can't be given".into());
        for (name, value) in &self.environment {
            let first = name.bytes().next().is_some_and(|b| b.is_ascii_alphabetic() || b == b'_');
            let good = first && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_');
            unless(good && name.len() <= 256, format!("{:?} is not a variable's name", shown(name)));
            unless(is_text(value), format!("the value of {} can't be given", shown(name)));
        }
        let mut published = BTreeSet::new();
        for port in &self.ports {
            unless(port.host != 0 && port.container != 0, "0 is not a port".into());
            let key = (port.host, port.protocol, port.address);
            unless(
                published.insert(key),
                format!("port {}/{} is named twice", port.host, port.protocol.name()),
            );
        }
        let mut targets = BTreeSet::new();
        for volume in &self.volumes {
            unless(
                is_volume(&volume.name),
                format!(
                    "{:?} is not a volume's name: letters, digits, _ . -; a path is none",
                    shown(&volume.name)
                ),
            );
            unless(
                is_target(&volume.target),
                format!(
                    "{:?} is not a place in a container: an absolute path, and not /",
                    shown(&volume.target)
                ),
            );
            unless(targets.insert(&volume.target), format!("{} is named twice", shown(&volume.target)));
        }
        if let Some(health) = &self.health {
            let words = &health.command;
            unless(
                !words.is_empty() && words.len() <= MOST_ITEMS && words.iter().all(|word| is_text(word)),
                "the health command can't be given".into(),
            );
            let times = [health.interval, health.timeout, health.retries];
            unless(
                times.iter().all(|n| (1..=300).contains(n)) && health.start <= 300,
                "times and retries of health are 1 to 300 (start 0 to 300)".into(),
            );
        }
        problems
    }
}

fn is_text(text: &str) -> bool {
    text.len() <= MOST_TEXT && !text.contains('\0')
}

/// A name without odd bytes: Docker itself knows whether it is one. A flag or a path with dots is none.
fn is_image(image: &str) -> bool {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"._-/:@[]".contains(&b);
    (1..=512).contains(&image.len())
        && image.bytes().all(plain)
        && image.bytes().next().is_some_and(|b| b.is_ascii_alphanumeric() || b == b'[')
        && !image.contains("..")
        && !image.contains("//")
}

fn is_volume(name: &str) -> bool {
    (2..=128).contains(&name.len())
        && name.bytes().next().is_some_and(|b| b.is_ascii_alphanumeric())
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"_.-".contains(&b))
}

fn is_target(target: &str) -> bool {
    target.len() <= 512
        && target.len() > 1
        && target.starts_with('/')
        && !target.bytes().any(|b| b < b' ' || b == 0x7f || b == b':')
        && target.split('/').skip(1).all(|part| !part.is_empty() && part != "." && part != "..")
}

fn shown(text: &str) -> String {
    text.chars().take(80).collect()
}

/// An image's name and its tag or digest, as Docker is asked to pull it.
pub(crate) fn name_and_tag(image: &str) -> (&str, &str) {
    if let Some((name, digest)) = image.split_once('@') {
        return (name, digest);
    }
    match image.rsplit_once(':') {
        Some((name, tag)) if !tag.contains('/') => (name, tag),
        _ => (image, "latest"),
    }
}

#[cfg(test)]
pub(super) mod tests {
    #![allow(clippy::unwrap_used)]
    use serde_json::{Value, json};

    use super::*;

    /// One with something of everything.
    pub(crate) fn full() -> Value {
        json!({
            "name": "web", "image": "registry.test:5000/team/web:1.2", "command": ["serve", "--all"],
            "environment": {"A_1": "b c"},
            "ports": [{"host": 8080, "container": 80}, {"host": 53, "container": 53, "protocol": "udp", "address": "127.0.0.1"}],
            "volumes": [{"name": "data", "target": "/data"}, {"name": "conf.d", "target": "/app/conf", "read_only": true}],
            "restart": "on-failure", "health": {"command": ["true"], "interval": 1}, "pull": "always",
        })
    }

    fn problems(value: &Value) -> Vec<String> {
        read(value.to_string().as_bytes()).map_or_else(|e| vec![e], |_| Vec::new())
    }

    #[test]
    fn what_may_be_asked_for_is_a_list_and_nothing_else() {
        assert_eq!(problems(&full()), Vec::<String>::new());
        assert_eq!(problems(&json!({"name": "a", "image": "web"})), Vec::<String>::new());
        let with = |pointer: &str, value: Value| {
            let mut spec = full();
            match spec.pointer_mut(pointer) {
                Some(place) => *place = value,
                None => spec[pointer.trim_start_matches('/')] = value,
            }
            spec
        };
        for (pointer, value) in [
            ("/privileged", json!(true)),
            ("/binds", json!(["/:/host"])),
            ("/devices", json!(["/dev/mem"])),
            ("/network", json!("host")),
            ("/labels", json!({"ployz.service": "db"})),
            ("/name", json!("../web")),
            ("/name", json!("Web")),
            ("/name", json!("-web")),
            ("/name", json!("")),
            ("/name", json!("w".repeat(41))),
            ("/name", json!("web\n")),
            ("/image", json!("--privileged")),
            ("/image", json!("a b")),
            ("/image", json!("../../etc")),
            ("/image", json!("web\u{0}")),
            ("/image", json!("web?fromSrc=-")),
            ("/image", json!("")),
            ("/environment", json!({"A=B": "c"})),
            ("/environment", json!({"": "c"})),
            ("/ports/0", json!([8080, 80])),
            ("/health", json!([["true"]])),
            ("/environment", json!({"A": "b\u{0}c"})),
            ("/environment", json!({"A": "x".repeat(5000)})),
            ("/ports/0/host", json!(0)),
            ("/ports/0/host", json!(65536)),
            ("/ports/0/address", json!("localhost")),
            ("/ports/0/protocol", json!("sctp")),
            ("/volumes/0/name", json!("/")),
            ("/volumes/0/name", json!("/x/docker.sock")),
            ("/volumes/0/name", json!("..")),
            ("/volumes/0/name", json!("a:b")),
            ("/volumes/0/name", json!("~root")),
            ("/volumes/0/target", json!("/")),
            ("/volumes/0/target", json!("data")),
            ("/volumes/0/target", json!("/a/../b")),
            ("/volumes/0/target", json!("/a:/b")),
            ("/volumes/1/target", json!("/data")),
            ("/volumes/0", json!({"name": "data", "target": "/data", "driver": "local"})),
            ("/restart", json!("sometimes")),
            ("/health/command", json!([])),
            ("/health/interval", json!(0)),
            ("/pull", json!("never ever")),
            ("/command", json!(vec!["x"; 65])),
        ] {
            assert!(!problems(&with(pointer, value.clone())).is_empty(), "{pointer}: {value}");
        }
    }

    #[test]
    fn nothing_is_named_twice() {
        for twice in [
            r#"{"name":"web","image":"a","image":"b"}"#,
            r#"{"name":"web","image":"a","environment":{"A":"1","A":"2"}}"#,
            r#"["web","a"]"#,
        ] {
            assert!(read(twice.as_bytes()).is_err(), "{twice}");
        }
    }

    #[test]
    fn an_image_is_a_name_and_a_tag() {
        assert_eq!(name_and_tag("web"), ("web", "latest"));
        assert_eq!(name_and_tag("web:1"), ("web", "1"));
        assert_eq!(name_and_tag("host:5000/web"), ("host:5000/web", "latest"));
        assert_eq!(name_and_tag("host:5000/web:2"), ("host:5000/web", "2"));
        assert_eq!(name_and_tag("web@sha256:00"), ("web", "sha256:00"));
    }
}
