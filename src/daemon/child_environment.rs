//! The environment of the command that `run` starts: without the credentials of sessiond. Pure.

use std::ffi::{OsStr, OsString};

/// The variables of sessiond that the command gets: they say where sessiond runs and grant nothing.
const PASSED: [&str; 14] = [
    "SESSIOND_ADDRESS",
    "SESSIOND_AGENT",
    "SESSIOND_COLOR",
    "SESSIOND_COMPLETE",
    "SESSIOND_HOOK_AFTER_TOOLS",
    "SESSIOND_HOOK_CHECKPOINT",
    "SESSIOND_HOOK_DEADLINE",
    "SESSIOND_HOOK_VERBOSE",
    "SESSIOND_LOG",
    "SESSIOND_LOG_FORMAT",
    "SESSIOND_NAMESPACE",
    "SESSIOND_NO_PAGER",
    "SESSIOND_QUIET",
    "SESSIOND_ROOT",
];

/// The variables with credentials of AWS. A region or an endpoint is no credential.
const AWS: [&str; 14] = [
    "AWS_ACCESS_KEY_ID",
    "AWS_CONFIG_FILE",
    "AWS_CONTAINER_AUTHORIZATION_TOKEN",
    "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_PROFILE",
    "AWS_ROLE_ARN",
    "AWS_ROLE_SESSION_NAME",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SECURITY_TOKEN",
    "AWS_SESSION_TOKEN",
    "AWS_SHARED_CREDENTIALS_FILE",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
];

/// Which credentials of this process belong to sessiond.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ChildEnvironment {
    /// The store is in S3.
    pub uses_aws: bool,
    /// The index is in PostgreSQL.
    pub uses_postgres: bool,
    /// The variables that the command gets nevertheless. A final `*` stands for any text.
    pub pass: Vec<String>,
}

impl ChildEnvironment {
    /// The variables that the command does not get.
    pub fn removed(&self, names: impl IntoIterator<Item = OsString>) -> Vec<OsString> {
        let is_removed = |name: &OsString| self.is_credential(name) && !self.is_passed(name);
        names.into_iter().filter(is_removed).collect()
    }

    fn is_credential(&self, name: &OsStr) -> bool {
        // A name that is not UTF-8 is none of these.
        let Some(name) = name.to_str() else {
            return false;
        };
        name.starts_with("SESSIOND_") && !PASSED.contains(&name)
            || self.uses_aws && AWS.contains(&name)
            || self.uses_postgres && name.starts_with("PG")
    }

    fn is_passed(&self, name: &OsStr) -> bool {
        let name = name.to_string_lossy();
        self.pass
            .iter()
            .any(|pattern| match pattern.strip_suffix('*') {
                Some(prefix) => name.starts_with(prefix),
                None => name == *pattern,
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn removed(environment: &ChildEnvironment) -> Vec<String> {
        let names = [
            "HOME",
            "SESSIOND_STORE",
            "SESSIOND_IDENTITY",
            "SESSIOND_ROOT",
            "SESSIOND_FUTURE_TOKEN",
            "AWS_SECRET_ACCESS_KEY",
            "AWS_REGION",
            "PGPASSWORD",
            "ANTHROPIC_API_KEY",
        ];
        let removed = environment.removed(names.map(OsString::from));
        let removed = removed.iter().map(|name| name.to_str().unwrap().to_owned());
        removed.collect()
    }

    #[test]
    fn the_command_gets_no_credentials_of_sessiond() {
        let own = [
            "SESSIOND_STORE",
            "SESSIOND_IDENTITY",
            "SESSIOND_FUTURE_TOKEN",
        ];
        let mut environment = ChildEnvironment::default();
        assert_eq!(removed(&environment), own);
        environment.uses_aws = true;
        environment.uses_postgres = true;
        let all = [&own[..], &["AWS_SECRET_ACCESS_KEY", "PGPASSWORD"]].concat();
        assert_eq!(removed(&environment), all);
    }

    #[test]
    fn variables_can_be_passed_by_name_or_prefix() {
        let environment = ChildEnvironment {
            uses_aws: true,
            uses_postgres: true,
            pass: vec!["AWS_*".to_owned(), "SESSIOND_STORE".to_owned()],
        };
        assert_eq!(
            removed(&environment),
            ["SESSIOND_IDENTITY", "SESSIOND_FUTURE_TOKEN", "PGPASSWORD"]
        );
    }
}
