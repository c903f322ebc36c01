//! The users and groups of this machine.

use super::directory::Owner;
use crate::error::{Error, Result};

/// Parses the owner of files, USER:GROUP with names or numbers. Without a group, it is the user's
/// own group.
pub fn parse_owner(text: &str) -> Result<Owner> {
    let (user, group) = text.split_once(':').unwrap_or((text, ""));
    let invalid = || {
        Error::usage(format!(
            "invalid --owner value {text:?}: unknown user or group"
        ))
        .hint("use USER:GROUP with names or numbers, as for chown")
    };
    let (uid, own_group) = match user.parse() {
        Ok(uid) => (uid, None),
        Err(_) => {
            let found = find_account("/etc/passwd", user).ok_or_else(invalid)?;
            (found.0, found.1)
        }
    };
    let gid = match (group, group.parse()) {
        ("", _) => own_group.unwrap_or(uid),
        (_, Ok(gid)) => gid,
        (name, Err(_)) => find_account("/etc/group", name).ok_or_else(invalid)?.0,
    };
    Ok(Owner { uid, gid })
}

/// Looks up a name in a file such as /etc/passwd: its ID, and for a user also the group ID.
fn find_account(file: &str, name: &str) -> Option<(u32, Option<u32>)> {
    let text = std::fs::read_to_string(file).ok()?;
    let fields: Vec<&str> = text
        .lines()
        .map(|line| line.split(':').collect::<Vec<_>>())
        .find(|fields| fields.first() == Some(&name))?;
    Some((
        fields.get(2)?.parse().ok()?,
        fields.get(3).and_then(|gid| gid.parse().ok()),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_owner_is_parsed_as_by_chown() {
        assert_eq!(parse_owner("12:34").ok(), Some(Owner { uid: 12, gid: 34 }));
        assert_eq!(
            parse_owner("root:root").ok(),
            Some(Owner { uid: 0, gid: 0 })
        );
        assert_eq!(parse_owner("root").ok(), Some(Owner { uid: 0, gid: 0 }));
        assert!(parse_owner("nobody-of-that-name:1").is_err());
    }
}
