//! The Kubernetes manifests as rendered by kustomize: schemas, the restricted profile, the
//! readiness gate, and consistent timeouts.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::{
    Checkers, assert_known, assert_parses, check_and_detect_failure, file, flush_deadline, strings,
};
use crate::support::files::copy_dir;
use crate::support::{TempHome, fetch, or_skip, run};

/// The Kubernetes versions of each: the newest, and the oldest supported one.
const SESSIONS: [(&str, &[&str]); 4] = [
    ("overlays/aws/session", &["1.37", "1.29"]),
    ("overlays/keys/session", &["1.37", "1.25"]),
    ("init-container", &["1.37", "1.25"]),
    ("sidecar", &["1.37", "1.29"]),
];

/// What the sessions of a namespace share.
const SHARED: [&str; 2] = ["overlays/aws", "overlays/keys"];

/// kustomize, on a copy of the directory.
struct Kustomize {
    kubectl: PathBuf,
    home: TempHome,
}

impl Kustomize {
    fn new() -> Option<Kustomize> {
        let kubectl = or_skip(fetch::debian_package("kubernetes-client"))?.join("usr/bin/kubectl");
        let home = TempHome::new();
        let copy = home.path().join("kubernetes");
        copy_dir(&file("kubernetes"), &copy);
        // Files that git ignores.
        let secrets = copy.join("overlays/keys/secrets");
        std::fs::create_dir_all(&secrets).unwrap();
        for name in [
            "SESSIOND_INDEX",
            "AWS_ACCESS_KEY_ID",
            "AWS_SECRET_ACCESS_KEY",
            "ANTHROPIC_API_KEY",
        ] {
            std::fs::write(secrets.join(name), "no secret").unwrap();
        }
        for part in [
            "common",
            "sidecar",
            "init-container",
            "entrypoint",
            "overlays/aws",
            "overlays/keys",
            "overlays/aws/session",
            "overlays/keys/session",
        ] {
            with_bases(&copy.join(part).join("kustomization.yaml"));
        }
        Some(Kustomize { kubectl, home })
    }

    fn build(&self, part: &str) -> Result<String, String> {
        let mut kubectl = self.home.command(&self.kubectl);
        let built = kubectl
            .arg("kustomize")
            .arg(self.home.path().join("kubernetes").join(part))
            .output()
            .map_err(|e| e.to_string())?;
        let stderr = String::from_utf8_lossy(&built.stderr).into_owned();
        if built.status.success() {
            String::from_utf8(built.stdout).map_err(|e| e.to_string())
        } else {
            Err(stderr)
        }
    }
}

/// Debian's kubectl does not accept directories in `resources`. It calls them `bases`, which the
/// newest version still accepts.
fn with_bases(path: &Path) {
    let text = std::fs::read_to_string(path).unwrap();
    let (directories, others): (Vec<&str>, Vec<&str>) =
        text.lines().partition(|line| line.starts_with("  - ../"));
    let mut changed = others.join("\n");
    if !directories.is_empty() {
        changed += &format!("\nbases:\n{}\n", directories.join("\n"));
        for next in ["configMapGenerator:", "generatorOptions:"] {
            changed = changed.replace(&format!("resources:\n{next}"), next);
        }
    }
    std::fs::write(path, changed).unwrap();
}

/// The pod of a workload.
fn pod(document: &Value) -> Option<&Value> {
    let spec = match document["kind"].as_str()? {
        "Job" | "Deployment" => &document["spec"]["template"]["spec"],
        "CronJob" => &document["spec"]["jobTemplate"]["spec"]["template"]["spec"],
        _ => return None,
    };
    Some(spec)
}

fn containers(pod: &Value) -> impl Iterator<Item = &Value> {
    ["initContainers", "containers"]
        .into_iter()
        .flat_map(|kind| pod[kind].as_array().into_iter().flatten())
}

/// The arguments of sessiond, if the container runs it.
fn arguments(container: &Value) -> Option<Vec<String>> {
    let mut all = [strings(&container["command"]), strings(&container["args"])].concat();
    if container["image"].as_str()?.contains("sessiond") {
        return Some(all);
    }
    (all.first()? == "sessiond")
        .then(|| all.remove(0))
        .map(|_| all)
}

/// Checks the Pod Security Standard `restricted`, and a read-only root directory.
fn check_restricted(pod: &Value) -> Result<(), String> {
    let of_pod = &pod["securityContext"];
    let wanted = of_pod["runAsNonRoot"] == true
        && of_pod["seccompProfile"]["type"] == "RuntimeDefault"
        && of_pod["runAsUser"] == 1000;
    if !wanted || pod["automountServiceAccountToken"] != false {
        return Err(format!("the pod may too much: {of_pod}"));
    }
    for container in containers(pod) {
        let own = &container["securityContext"];
        let dropped = own["capabilities"] == json!({ "drop": ["ALL"] });
        if !dropped
            || own["allowPrivilegeEscalation"] != false
            || own["readOnlyRootFilesystem"] != true
        {
            return Err(format!("{} may too much: {own}", container["name"]));
        }
    }
    Ok(())
}

/// Checks that the probes use sessiond's port, and that the final flush ends before the pod is
/// killed.
fn check_timeouts(pod: &Value) -> Result<(), String> {
    for container in containers(pod) {
        let Some(arguments) = arguments(container) else {
            continue;
        };
        let name = &container["name"];
        if let Some(deadline) = flush_deadline(&arguments) {
            let grace = pod["terminationGracePeriodSeconds"].as_u64().unwrap_or(30);
            if grace < deadline + 5 {
                return Err(format!(
                    "{name}: {deadline} s for the final flush, and {grace} s until it is killed"
                ));
            }
        }
        let port = container["ports"][0]["containerPort"].as_u64();
        for (probe, path) in [
            ("startupProbe", "/readyz"),
            ("readinessProbe", "/readyz"),
            ("livenessProbe", "/healthz"),
        ] {
            let Some(probe) = container.get(probe) else {
                continue;
            };
            let listens =
                port.is_some_and(|port| arguments.contains(&format!("--http=0.0.0.0:{port}")));
            if !listens
                || probe["httpGet"]
                    != json!({ "path": path, "port": container["ports"][0]["name"] })
            {
                return Err(format!("{name}: nobody answers {probe}"));
            }
        }
    }
    Ok(())
}

#[test]
fn kubernetes_manifests_match_the_api_schemas() {
    let (Some(checkers), Some(kustomize)) = (Checkers::new(), Kustomize::new()) else {
        return;
    };
    let validate = |version: &str, text: &str| {
        let named = checkers.write_temp_file("built.yaml", text);
        run(checkers
            .program("kubernetes-validate")
            .env("PYTHONPATH", &checkers.packages)
            .args(["-k", version, "--strict"])
            .arg(named))
    };
    for part in SHARED {
        let built = kustomize.build(part).unwrap();
        for version in ["1.37", "1.25"] {
            let check = |text: &str| validate(version, text);
            check_and_detect_failure(&built, ("egress:", "egres:"), "egres", check);
        }
    }
    for (part, versions) in SESSIONS {
        let built = kustomize.build(part).unwrap();
        for version in versions {
            let check = |text: &str| validate(version, text);
            check_and_detect_failure(
                &built,
                ("terminationGracePeriodSeconds", "terminationGracePeriod"),
                "terminationGracePeriod",
                check,
            );
            check_and_detect_failure(
                &built,
                ("runAsUser: 1000", "runAsUser: agent"),
                "agent",
                check,
            );
        }
    }
    // Older versions do not support native sidecars.
    let sidecar = checkers.write_temp_file("built.yaml", &kustomize.build("sidecar").unwrap());
    let older = run(checkers
        .program("kubernetes-validate")
        .env("PYTHONPATH", &checkers.packages)
        .args(["-k", "1.27", "--strict"])
        .arg(sidecar));
    assert!(older.is_err_and(|why| why.contains("restartPolicy")));
}

#[test]
fn kubernetes_manifests_are_restricted_and_their_timeouts_fit() {
    let (Some(checkers), Some(kustomize)) = (Checkers::new(), Kustomize::new()) else {
        return;
    };
    let each = |text: &str, check: fn(&Value) -> Result<(), String>| {
        let documents = checkers.yaml(text);
        assert!(
            documents.iter().filter_map(pod).count() == 1,
            "an agent, or the collector"
        );
        documents.iter().filter_map(pod).try_for_each(check)
    };
    for part in SESSIONS.map(|(part, _)| part).into_iter().chain(SHARED) {
        let built = kustomize.build(part).unwrap();
        let breaks = |from: &str, to: &str, why: &str, check| {
            check_and_detect_failure(&built, (from, to), why, |text| each(text, check))
        };
        breaks(
            "readOnlyRootFilesystem: true",
            "readOnlyRootFilesystem: false",
            "may too much",
            check_restricted,
        );
        breaks(
            "runAsNonRoot: true",
            "runAsNonRoot: false",
            "may too much",
            check_restricted,
        );
        breaks(
            "ephemeral-storage",
            "storage",
            "without a limit",
            check_limits,
        );
        if !SHARED.contains(&part) {
            breaks(
                "0.0.0.0:9464",
                "127.0.0.1:9464",
                "nobody answers",
                check_timeouts,
            );
            breaks(
                "terminationGracePeriodSeconds: ",
                "terminationGracePeriodSeconds: 1 # ",
                "until it is killed",
                check_timeouts,
            );
        }
        for document in checkers.yaml(&built) {
            for container in pod(&document).into_iter().flat_map(containers) {
                // As the kubelet expands them.
                let filled = |argument: &String| {
                    argument.replace(
                        "$(SESSIOND_SESSION)",
                        "3f2a0000-0000-4000-8000-000000000001",
                    )
                };
                if let Some(arguments) = arguments(container) {
                    assert_parses(&arguments.iter().map(filled).collect::<Vec<_>>());
                }
            }
            if document["kind"] == "ConfigMap" {
                let names = document["data"]
                    .as_object()
                    .unwrap()
                    .keys()
                    .filter(|name| name.starts_with("SESSIOND_"));
                names.for_each(|name| assert_known(name));
            }
        }
    }
    // The sidecar has a readiness gate, and the agent has no credentials of the bucket.
    let job = checkers
        .yaml(&kustomize.build("overlays/aws/session").unwrap())
        .into_iter()
        .find(|document| document["kind"] == "Job")
        .unwrap();
    let pod = pod(&job).unwrap();
    let sidecar = &pod["initContainers"][0];
    assert_eq!(
        (
            &sidecar["restartPolicy"],
            &sidecar["startupProbe"]["httpGet"]["path"]
        ),
        (&json!("Always"), &json!("/readyz"))
    );
    let mounts = |container: &Value| {
        container["volumeMounts"]
            .as_array()
            .unwrap()
            .iter()
            .map(|mount| mount["name"].clone())
            .collect::<Vec<_>>()
    };
    assert!(
        mounts(sidecar).contains(&json!("token"))
            && !mounts(&pod["containers"][0]).contains(&json!("token"))
    );
}

/// Every container asks for what it needs and cannot fill the node.
fn check_limits(pod: &Value) -> Result<(), String> {
    for container in containers(pod) {
        let resources = &container["resources"];
        let asks = ["cpu", "memory", "ephemeral-storage"]
            .iter()
            .all(|name| resources["requests"][*name].is_string());
        let ends = ["memory", "ephemeral-storage"]
            .iter()
            .all(|name| resources["limits"][*name].is_string());
        if !asks || !ends {
            return Err(format!(
                "{} is without a limit: {resources}",
                container["name"]
            ));
        }
    }
    Ok(())
}

#[test]
fn sessions_have_names_of_their_own_and_share_the_walls() {
    let (Some(checkers), Some(kustomize)) = (Checkers::new(), Kustomize::new()) else {
        return;
    };
    let overlays = kustomize.home.path().join("kubernetes/overlays/aws");
    copy_dir(&overlays.join("session"), &overlays.join("another"));
    let file = overlays.join("another/kustomization.yaml");
    let text = std::fs::read_to_string(&file).unwrap();
    let text = text.replace("nameSuffix: -3f2a", "nameSuffix: -7c1d");
    std::fs::write(&file, text.replace("SESSION=3f2a", "SESSION=7c1d")).unwrap();
    let names = |part: &str| -> std::collections::BTreeSet<String> {
        let documents = checkers.yaml(&kustomize.build(part).unwrap());
        let name =
            |document: &Value| format!("{} {}", document["kind"], document["metadata"]["name"]);
        documents.iter().map(name).collect()
    };
    let (one, other) = (names("overlays/aws/session"), names("overlays/aws/another"));
    assert_eq!((one.len(), other.len()), (2, 2), "{one:?} {other:?}");
    assert!(one.is_disjoint(&other), "{one:?} {other:?}");

    // A session refers to what is shared by the name that it has there.
    let shared = names("overlays/aws");
    for name in [
        "ServiceAccount\" \"agent",
        "ConfigMap\" \"sessiond",
        "Namespace\" \"agents",
    ] {
        assert!(
            shared.contains(&format!("\"{name}\"")),
            "{name}: {shared:?}"
        );
    }
    let documents = checkers.yaml(&kustomize.build("overlays/aws").unwrap());
    let of_kind = |kind: &str| {
        documents
            .iter()
            .find(|document| document["kind"] == kind)
            .unwrap()
    };
    assert_eq!(
        of_kind("Namespace")["metadata"]["labels"]["pod-security.kubernetes.io/enforce"],
        "restricted"
    );
    let policy = &of_kind("NetworkPolicy")["spec"];
    assert_eq!(policy["policyTypes"], json!(["Ingress", "Egress"]));
    assert!(
        policy["egress"].to_string().contains("169.254.0.0/16"),
        "{policy}"
    );
    let settings = documents.iter().find(|document| {
        document["kind"] == "ConfigMap" && document["metadata"]["name"] == "sessiond"
    });
    assert_eq!(settings.unwrap()["data"]["PGSSLMODE"], "verify-full");
    // Images by digest, and one home directory everywhere.
    for part in SHARED
        .into_iter()
        .chain(["overlays/aws/session", "overlays/keys/session"])
    {
        for document in checkers.yaml(&kustomize.build(part).unwrap()) {
            for container in pod(&document).into_iter().flat_map(containers) {
                let image = container["image"].as_str().unwrap();
                assert!(image.contains("@sha256:"), "{image}");
                let mounts = container["volumeMounts"].as_array().unwrap();
                let home = mounts.iter().find(|mount| mount["name"] == "home").unwrap();
                assert_eq!(home["mountPath"], "/home/agent");
            }
        }
    }
    for image in ["Dockerfile", "agent.Dockerfile"] {
        let text = super::text(image);
        assert!(
            text.contains("WORKDIR /home/agent\n") && text.contains("ENV HOME=/home/agent"),
            "{image}"
        );
    }
}

#[test]
fn no_deploy_file_contains_a_secret() {
    let ignored =
        std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(".gitignore")).unwrap();
    assert!(
        ignored.contains("deploy/kubernetes/overlays/*/secrets/")
            && ignored.contains("deploy/.env\n"),
        "{ignored}"
    );
    let Some(kustomize) = Kustomize::new() else {
        return;
    };
    std::fs::remove_file(
        kustomize
            .home
            .path()
            .join("kubernetes/overlays/keys/secrets/SESSIOND_INDEX"),
    )
    .unwrap();
    let error = kustomize
        .build("overlays/keys")
        .expect_err("a secret was made of nothing");
    assert!(error.contains("SESSIOND_INDEX"), "{error}");
}
