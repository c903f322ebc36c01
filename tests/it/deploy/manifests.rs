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
const BUILDS: [(&str, &[&str]); 4] = [
    ("overlays/aws", &["1.37", "1.29"]),
    ("overlays/keys", &["1.37", "1.25"]),
    ("init-container", &["1.37", "1.25"]),
    ("sidecar", &["1.37", "1.29"]),
];

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
        changed = changed.replace("resources:\nconfigMapGenerator:", "configMapGenerator:");
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
    for (part, versions) in BUILDS {
        let built = kustomize.build(part).unwrap();
        for version in versions {
            let check = |text: &str| {
                let named = checkers.write_temp_file("built.yaml", text);
                run(checkers
                    .program("kubernetes-validate")
                    .env("PYTHONPATH", &checkers.packages)
                    .args(["-k", version, "--strict"])
                    .arg(named))
            };
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
            documents.iter().filter_map(pod).count() == 2,
            "an agent and the collector"
        );
        documents.iter().filter_map(pod).try_for_each(check)
    };
    for (part, _) in BUILDS {
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
        .yaml(&kustomize.build("overlays/aws").unwrap())
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
