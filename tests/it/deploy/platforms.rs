//! Compose, systemd, ECS and the bucket's lifecycle rule.

use std::process::Command;

use serde_json::Value;

use super::{
    Checkers, assert_known, assert_parses, check_and_detect_failure, flush_deadline, seconds,
    strings, text,
};
use crate::support::{fetch, or_skip, run, sessiond};

#[test]
fn the_compose_file_is_valid() {
    let Some(checkers) = Checkers::new() else {
        return;
    };
    let compose = text("docker-compose.yml");
    let check = |text: &str| {
        let named = checkers.write_temp_file("docker-compose.yml", text);
        run(checkers
            .python(&[
                "-m",
                "check_jsonschema",
                "--builtin-schema",
                "vendor.compose-spec",
            ])
            .arg(named))
    };
    check_and_detect_failure(
        &compose,
        ("stop_grace_period: 30s", "stop_grace_time: 30s"),
        "stop_grace_time",
        check,
    );
    let services = &checkers.yaml(&compose)[0]["services"];
    let sidecar = &services["sessiond"];
    let arguments: Vec<String> = strings(&sidecar["command"])
        .iter()
        .map(|argument| interpolated(argument))
        .collect();
    assert_parses(&arguments);
    let grace = seconds(sidecar["stop_grace_period"].as_str().unwrap());
    assert!(
        grace >= flush_deadline(&arguments).unwrap() + 5,
        "the final flush must end by itself"
    );
    for (name, _) in sidecar["environment"]
        .as_object()
        .unwrap()
        .iter()
        .filter(|(name, _)| name.starts_with("SESSIOND_"))
    {
        assert_known(name);
    }
    // One directory, one user, and the agent waits for the gate.
    assert_eq!(
        (&sidecar["volumes"], &sidecar["user"]),
        (&services["agent"]["volumes"], &services["agent"]["user"])
    );
    assert_eq!(
        services["agent"]["depends_on"]["sessiond"]["condition"],
        "service_healthy"
    );
    // The example has exactly the required variables, and contains no secret.
    let example = text("compose.env.example");
    for line in example.lines().filter(|line| !line.starts_with('#')) {
        let name = line
            .strip_suffix('=')
            .unwrap_or_else(|| panic!("{line} has a value"));
        assert!(
            compose.contains(&format!("${{{name}:?")) || compose.contains(&format!("${{{name}}}")),
            "{name}"
        );
    }
    let needed = compose.split("${").skip(1).filter_map(|rest| {
        rest.split_once(":?")
            .filter(|(name, _)| !name.contains('}'))
    });
    for (name, _) in needed {
        assert!(
            example.contains(&format!("{name}=\n")),
            "{name} is not in the example"
        );
    }
}

/// The text with variables expanded as Compose does.
fn interpolated(text: &str) -> String {
    match (text.find("${"), text.find('}')) {
        (Some(from), Some(to)) => format!("{}something{}", &text[..from], &text[to + 1..]),
        _ => text.to_owned(),
    }
}

#[test]
fn the_systemd_unit_is_valid_and_hardened() {
    if or_skip(fetch::program_of("systemd", "systemd-analyze")).is_none() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let unit = text("systemd/sessiond@.service");
    // An instance for a user that every machine has, with the path of the program.
    let path = directory.path().join("sessiond@root.service");
    let analyze = |text: &str, verb: &[&str]| {
        std::fs::write(
            &path,
            text.replace("/usr/local/bin/sessiond", &sessiond().to_string_lossy()),
        )
        .unwrap();
        // No running service manager is needed.
        run(Command::new("systemd-analyze")
            .args(verb)
            .arg(&path)
            .env("SYSTEMD_LOG_LEVEL", "warning"))
    };
    let verify = |text: &str| {
        analyze(text, &["verify", "--man=no"])?;
        // An unknown setting is only a warning, but must fail here.
        let output = Command::new("systemd-analyze")
            .args(["verify", "--man=no"])
            .arg(&path)
            .output()
            .map_err(|e| e.to_string())?;
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        if stderr.contains("sessiond@") {
            Err(stderr)
        } else {
            Ok(())
        }
    };
    check_and_detect_failure(
        &unit,
        ("ProtectSystem=strict", "ProtectSytem=strict"),
        "ProtectSytem",
        verify,
    );
    // Out of 10, where 10 is a unit without hardening.
    let exposure = |text: &str| {
        analyze(
            text,
            &["security", "--offline=true", "--threshold=20", "--no-pager"],
        )
    };
    check_and_detect_failure(
        &unit,
        ("CapabilityBoundingSet=\n", ""),
        "Overall exposure",
        exposure,
    );
    let setting = |name: &str| {
        unit.lines()
            .find_map(|line| line.strip_prefix(&format!("{name}=")))
            .unwrap_or_else(|| panic!("{name}"))
    };
    let start: Vec<String> = setting("ExecStart")
        .split(' ')
        .skip(1)
        .map(str::to_owned)
        .collect();
    assert_parses(&start);
    assert!(
        seconds(setting("TimeoutStopSec")) >= flush_deadline(&start).unwrap() + 5,
        "the final flush must end by itself"
    );
}

/// Checks a request against the AWS model of the call.
fn aws(checkers: &Checkers, service: &str, call: &str, request: &Value) -> Result<(), String> {
    const VALIDATE: &str = "import botocore.session, botocore.validate, json, sys\n\
        shape = botocore.session.get_session().get_service_model(sys.argv[1]).operation_model(sys.argv[2]).input_shape\n\
        request = json.load(open(sys.argv[3]))\n\
        report = botocore.validate.ParamValidator().validate(request, shape)\n\
        sys.exit(report.generate_report() or None)";
    run(checkers
        .python(&["-c", VALIDATE, service, call])
        .arg(checkers.write_temp_file("request.json", &request.to_string())))
}

#[test]
fn the_ecs_task_definition_is_valid() {
    let Some(checkers) = Checkers::new() else {
        return;
    };
    let definition = text("aws/ecs-task-definition.json");
    let check = |text: &str| {
        aws(
            &checkers,
            "ecs",
            "RegisterTaskDefinition",
            &serde_json::from_str(text).unwrap(),
        )
    };
    check_and_detect_failure(
        &definition,
        ("\"stopTimeout\"", "\"stopTimeOut\""),
        "stopTimeOut",
        check,
    );
    let definition: Value = serde_json::from_str(&definition).unwrap();
    let container = |name: &str| {
        let all = definition["containerDefinitions"].as_array().unwrap();
        all.iter()
            .find(|container| container["name"] == name)
            .unwrap()
            .clone()
    };
    let (sidecar, agent) = (container("sessiond"), container("agent"));
    let arguments = strings(&sidecar["command"]);
    assert_parses(&arguments);
    assert!(
        sidecar["stopTimeout"].as_u64().unwrap() >= flush_deadline(&arguments).unwrap() + 5,
        "the final flush must end by itself"
    );
    // The maximum of Fargate.
    assert!(
        [&sidecar, &agent]
            .iter()
            .all(|container| container["stopTimeout"].as_u64().unwrap() <= 120)
    );
    assert_eq!(
        agent["dependsOn"],
        serde_json::json!([{ "containerName": "sessiond", "condition": "HEALTHY" }])
    );
    assert_eq!(
        (&sidecar["mountPoints"], &sidecar["user"]),
        (&agent["mountPoints"], &agent["user"])
    );
    for variable in sidecar["environment"].as_array().unwrap() {
        assert_known(variable["name"].as_str().unwrap());
    }
}

#[test]
fn the_lifecycle_rule_never_expires_stored_objects() {
    let Some(checkers) = Checkers::new() else {
        return;
    };
    let rules = text("aws/lifecycle.json");
    let check = |text: &str| {
        let rules: Value = serde_json::from_str(text).unwrap();
        let request = serde_json::json!({ "Bucket": "bucket", "LifecycleConfiguration": rules });
        aws(&checkers, "s3", "PutBucketLifecycleConfiguration", &request)?;
        let rules = rules["Rules"].as_array().cloned().unwrap_or_default();
        match rules.iter().find(|rule| {
            rule["Expiration"]
                .get("Days")
                .or(rule["Expiration"].get("Date"))
                .is_some()
                || rule.get("Transitions").is_some()
        }) {
            Some(rule) => Err(format!("would take objects from under a log: {rule}")),
            None => Ok(()),
        }
    };
    check_and_detect_failure(
        &rules,
        ("\"NoncurrentDays\"", "\"NonCurrentDays\""),
        "NonCurrentDays",
        check,
    );
    check_and_detect_failure(
        &rules,
        ("\"ExpiredObjectDeleteMarker\": true", "\"Days\": 30"),
        "under a log",
        check,
    );
    assert!(rules.contains("AbortIncompleteMultipartUpload"));
}
