//! From a specification to what Docker is asked to make. What is not written here can't be had.

use serde_json::{Map, Value, json};

use super::spec::{Health, Port, Spec};

/// The label that names the service of a container, and of a volume that was made for one.
pub(crate) const SERVICE: &str = "ployz.service";
/// The label that tells one specification from another.
pub(crate) const SPEC: &str = "ployz.spec";
/// The label that holds the restart policy which the container has while it is the one that serves.
pub(crate) const RESTART: &str = "ployz.restart";

/// The container's name: `ployz-web`.
pub(crate) fn container_name(service: &str) -> String {
    format!("ployz-{service}")
}

/// The name of the container that is to take its place. A dot: no service's name has one.
pub(crate) fn next_name(service: &str) -> String {
    format!("ployz-{service}.next")
}

/// What tells this specification of this image from another.
pub(crate) fn digest(spec: &Spec, image_id: &str) -> String {
    let mut spec = spec.clone();
    // When it is pulled says nothing of what runs.
    spec.pull = super::spec::Pull::default();
    let text = serde_json::to_string(&spec).unwrap_or_default();
    crate::durable::hex(
        ring::digest::digest(&ring::digest::SHA256, format!("{image_id}\n{text}").as_bytes()).as_ref(),
    )
}

/// The container. It is made without a restart policy: it gets the one that was asked for when it serves.
pub(crate) fn container(spec: &Spec, image_id: &str) -> Value {
    let environment: Vec<String> =
        spec.environment.iter().map(|(name, value)| format!("{name}={value}")).collect();
    let mounts: Vec<Value> = spec
        .volumes
        .iter()
        .map(|volume| {
            json!({"Type": "volume", "Source": volume.name, "Target": volume.target, "ReadOnly": volume.read_only})
        })
        .collect();
    let mut container = json!({
        "Image": image_id,
        "Env": environment,
        "Labels": {
            SERVICE: spec.name, SPEC: digest(spec, image_id), RESTART: spec.restart.name(),
            "ployz.image": spec.image,
        },
        "ExposedPorts": by_port(&spec.ports, |_| json!({})),
        "HostConfig": {
            "Mounts": mounts,
            "PortBindings": by_port(&spec.ports, |ports| {
                ports.iter().map(|port| json!({
                    "HostIp": port.address.map(|address| address.to_string()).unwrap_or_default(),
                    "HostPort": port.host.to_string(),
                })).collect()
            }),
            "RestartPolicy": {"Name": "no"},
            "NetworkMode": "bridge",
            "IpcMode": "private",
            "CgroupnsMode": "private",
            "PidMode": "",
            "UTSMode": "",
            "Privileged": false,
            "SecurityOpt": ["no-new-privileges"],
        },
    });
    if !spec.command.is_empty() {
        container["Cmd"] = json!(spec.command);
    }
    if let Some(health) = &spec.health {
        container["Healthcheck"] = healthcheck(health);
    }
    container
}

fn healthcheck(health: &Health) -> Value {
    let nanoseconds = |seconds: u16| u64::from(seconds) * 1_000_000_000;
    let kind = if health.command.len() == 1 { "CMD-SHELL" } else { "CMD" };
    let words: Vec<&str> = std::iter::once(kind).chain(health.command.iter().map(String::as_str)).collect();
    json!({
        "Test": words, "Interval": nanoseconds(health.interval), "Timeout": nanoseconds(health.timeout),
        "Retries": health.retries, "StartPeriod": nanoseconds(health.start),
    })
}

/// An object with an entry for each port of the container.
fn by_port(ports: &[Port], entry: impl Fn(&[&Port]) -> Value) -> Value {
    let mut by_port = Map::new();
    for port in ports {
        let key = format!("{}/{}", port.container, port.protocol.name());
        let same: Vec<&Port> = ports
            .iter()
            .filter(|other| (other.container, other.protocol) == (port.container, port.protocol))
            .collect();
        by_port.insert(key, entry(&same));
    }
    Value::Object(by_port)
}

/// The change of a restart policy.
pub(crate) fn restart_policy(name: &str) -> Value {
    json!({"RestartPolicy": {"Name": name}})
}

/// A volume of ours. Without options: those of the driver `local` lead to any path of the host.
pub(crate) fn volume(service: &str, name: &str, driver: &str) -> Value {
    json!({"Name": name, "Driver": driver, "Labels": {SERVICE: service}})
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn full() -> Spec {
        serde_json::from_value(super::super::spec::tests::full()).unwrap()
    }

    #[test]
    fn the_whole_of_what_docker_is_asked_for() {
        let made = container(&full(), "sha256:0a");
        assert_eq!(
            made["HostConfig"],
            json!({
                "Mounts": [
                    {"Type": "volume", "Source": "data", "Target": "/data", "ReadOnly": false},
                    {"Type": "volume", "Source": "conf.d", "Target": "/app/conf", "ReadOnly": true},
                ],
                "PortBindings": {
                    "80/tcp": [{"HostIp": "", "HostPort": "8080"}],
                    "53/udp": [{"HostIp": "127.0.0.1", "HostPort": "53"}],
                },
                "RestartPolicy": {"Name": "no"}, "NetworkMode": "bridge", "IpcMode": "private",
                "CgroupnsMode": "private", "PidMode": "", "UTSMode": "", "Privileged": false,
                "SecurityOpt": ["no-new-privileges"],
            })
        );
        let keys: Vec<&String> = made.as_object().unwrap().keys().collect();
        assert_eq!(keys, ["Cmd", "Env", "ExposedPorts", "Healthcheck", "HostConfig", "Image", "Labels"]);
        assert_eq!(made["Healthcheck"]["Test"], json!(["CMD-SHELL", "true"]));
        assert_eq!(made["Healthcheck"]["Interval"], 1_000_000_000u64);
        assert_eq!(volume("web", "data", "local").as_object().unwrap().len(), 3, "no options");
    }

    #[test]
    fn what_runs_tells_one_specification_from_another() {
        let (one, mut other) = (full(), full());
        assert_eq!(digest(&one, "a"), digest(&other, "a"));
        assert_ne!(digest(&one, "a"), digest(&one, "b"));
        other.pull = super::super::spec::Pull::Never;
        assert_eq!(digest(&one, "a"), digest(&other, "a"));
        other.environment.insert("X".into(), "1".into());
        assert_ne!(digest(&one, "a"), digest(&other, "a"));
    }
}
