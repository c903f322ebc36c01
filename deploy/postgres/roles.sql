-- Roles for the index of sessiond: one that owns the tables, one that sees every namespace, and one for each namespace that sees
-- its own rows and no others. Run it as a superuser, in the index's database, and again whenever sessiond has new tables:
--
--     1. psql -d sessiond -f roles.sql            makes the roles
--     2. sessiond doctor --index 'postgres://sessiond_owner@HOST/sessiond'     makes the tables
--     3. psql -d sessiond -f roles.sql            puts the walls up
--     4. psql -d sessiond -c "SELECT sessiond_add_namespace('team-a')"         a role for a namespace; then give it a password
--
-- A namespace's role is named sessiond_ns_ and the namespace: sessiond --namespace team-a logs in as "sessiond_ns_team-a". Names of
-- roles have at most 63 bytes, so a namespace that gets a role has at most 51.

DO $$
BEGIN
    IF NOT EXISTS (SELECT 1 FROM pg_roles WHERE rolname = 'sessiond_owner') THEN
        CREATE ROLE sessiond_owner LOGIN;
    END IF;
    IF NOT EXISTS (SELECT 1 FROM pg_roles WHERE rolname = 'sessiond_operator') THEN
        CREATE ROLE sessiond_operator LOGIN;
    END IF;
    -- What all namespaces may do to the rows that they see. Nobody logs in as this.
    IF NOT EXISTS (SELECT 1 FROM pg_roles WHERE rolname = 'sessiond_namespaces') THEN
        CREATE ROLE sessiond_namespaces NOLOGIN;
    END IF;
END
$$;

-- Only the owner makes tables, and so only the owner migrates.
REVOKE CREATE ON SCHEMA public FROM PUBLIC;
GRANT USAGE, CREATE ON SCHEMA public TO sessiond_owner;
GRANT USAGE ON SCHEMA public TO sessiond_operator, sessiond_namespaces;

-- Makes the role of a namespace, or does nothing if it is there.
CREATE OR REPLACE FUNCTION sessiond_add_namespace(namespace TEXT) RETURNS TEXT LANGUAGE plpgsql SET search_path = pg_catalog AS $$
DECLARE
    role TEXT := 'sessiond_ns_' || namespace;
BEGIN
    IF octet_length(role) > 63 THEN
        RAISE EXCEPTION 'namespace % is too long for the name of a role', namespace;
    END IF;
    IF NOT EXISTS (SELECT 1 FROM pg_roles WHERE rolname = role) THEN
        EXECUTE format('CREATE ROLE %I LOGIN IN ROLE sessiond_namespaces', role);
    END IF;
    RETURN role;
END
$$;
REVOKE ALL ON FUNCTION sessiond_add_namespace(TEXT) FROM PUBLIC;

-- The walls. Every table of sessiond has a namespace but the list of migrations, which all read to see that it is complete.
DO $$
DECLARE
    found RECORD;
BEGIN
    FOR found IN
        SELECT tables.relname AS name FROM pg_class AS tables
        JOIN pg_attribute AS columns ON columns.attrelid = tables.oid AND columns.attname = 'namespace' AND NOT columns.attisdropped
        WHERE tables.relkind = 'r' AND tables.relnamespace = 'public'::regnamespace
        AND tables.relowner = 'sessiond_owner'::regrole
    LOOP
        EXECUTE format('ALTER TABLE public.%I ENABLE ROW LEVEL SECURITY', found.name);
        EXECUTE format('GRANT SELECT, INSERT, UPDATE, DELETE ON public.%I TO sessiond_operator, sessiond_namespaces', found.name);
        EXECUTE format('DROP POLICY IF EXISTS sessiond_all ON public.%I', found.name);
        EXECUTE format('CREATE POLICY sessiond_all ON public.%I TO sessiond_operator USING (true) WITH CHECK (true)', found.name);
        EXECUTE format('DROP POLICY IF EXISTS sessiond_own ON public.%I', found.name);
        -- Equal to a value that is known before the rows are, so that indexes that begin with the namespace serve.
        EXECUTE format(
            'CREATE POLICY sessiond_own ON public.%I TO sessiond_namespaces '
            'USING (starts_with(current_user, ''sessiond_ns_'') AND namespace = substr(current_user, 13)) '
            'WITH CHECK (starts_with(current_user, ''sessiond_ns_'') AND namespace = substr(current_user, 13))',
            found.name
        );
    END LOOP;
    IF to_regclass('public.sessiond_migrations') IS NOT NULL THEN
        GRANT SELECT ON public.sessiond_migrations TO sessiond_operator, sessiond_namespaces;
    END IF;
END
$$;
