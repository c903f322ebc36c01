-- Roles for the index of sessiond: an owner of the tables, an operator that sees all namespaces, and
-- one role per namespace that sees only its own rows. Run it as a superuser in the database of the
-- index, and again after an upgrade that adds tables:
--
--     1. psql -d sessiond -f roles.sql            create the roles
--     2. sessiond doctor --index 'postgres://sessiond_owner@HOST/sessiond'     create the tables
--     3. psql -d sessiond -f roles.sql            restrict the tables
--     4. psql -d sessiond -c "SELECT sessiond_add_namespace('team-a')"         add a role; then set its password
--
-- The role of a namespace is sessiond_ns_ and the namespace: sessiond --namespace team-a logs in as
-- "sessiond_ns_team-a". PostgreSQL limits role names to 63 bytes, so the namespace of a role has at
-- most 51.

DO $$
BEGIN
    IF NOT EXISTS (SELECT 1 FROM pg_roles WHERE rolname = 'sessiond_owner') THEN
        CREATE ROLE sessiond_owner LOGIN;
    END IF;
    IF NOT EXISTS (SELECT 1 FROM pg_roles WHERE rolname = 'sessiond_operator') THEN
        CREATE ROLE sessiond_operator LOGIN;
    END IF;
    -- Has the rights of all namespace roles on the rows that they see. It cannot log in.
    IF NOT EXISTS (SELECT 1 FROM pg_roles WHERE rolname = 'sessiond_namespaces') THEN
        CREATE ROLE sessiond_namespaces NOLOGIN;
    END IF;
END
$$;

-- Only the owner can create tables, so only the owner migrates.
REVOKE CREATE ON SCHEMA public FROM PUBLIC;
GRANT USAGE, CREATE ON SCHEMA public TO sessiond_owner;
GRANT USAGE ON SCHEMA public TO sessiond_operator, sessiond_namespaces;

-- Creates the role of a namespace, if it does not exist.
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

-- Row level security. Every table has a namespace, except the list of migrations, which all roles can
-- read.
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
        -- The value to compare with is known before the rows are read, so PostgreSQL can use indexes that
        -- start with the namespace.
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
